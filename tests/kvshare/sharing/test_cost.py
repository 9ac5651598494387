"""The cost model: moving averages, and estimates that follow from them."""

import pytest

from kvshare.sharing.cost import CostModel, Rates


def model() -> CostModel:
    return CostModel(Rates(1000.0, 1e9, bytes_per_token=1000), smoothing=0.5)


def test_averages_move_towards_what_is_measured() -> None:
    """Half the weight is the newest measurement's, here."""
    cost = model()
    cost.observe_prefill(1000, 0.5)
    cost.observe_load(10**9, 0.25)
    cost.observe_lookup(5.0)  # cold
    cost.observe_lookup(0.01)
    assert cost.rates.prefill_tokens_per_s == pytest.approx(1500)
    assert cost.rates.load_bytes_per_s == pytest.approx(2.5e9)
    assert cost.rates.lookup_s == pytest.approx(0.005)


def test_what_was_measured_is_known() -> None:
    """Until then a rate is what the settings say; a short pass measures no rate."""
    cost = model()
    assert cost.measured == frozenset()
    cost.observe_prefill(100, 0.2)
    assert cost.measured == frozenset()
    cost.observe_prefill(1000, 0.5)
    assert cost.measured == {"prefill"}
    cost.observe_load(10**9, 0.25)
    assert cost.measured == {"prefill", "load"}


def test_single_tokens_and_empty_loads_teach_nothing() -> None:
    """Decoding steps are no prefill, and nothing loaded has no rate."""
    cost = model()
    cost.observe_prefill(1, 1.0)
    cost.observe_load(0, 1.0)
    assert cost.rates == model().rates


def test_a_token_that_is_attended_to_may_cost_too() -> None:
    """Latents are expanded in every pass, here at a tenth of a token: a plan saves that much less."""
    rates = Rates(1000.0, 1e9, context_share=1 / 9)
    estimate = rates.estimate(num_tokens=2000, num_computed=500)
    assert estimate.full_s == pytest.approx(2.0)
    assert estimate.shared_s == pytest.approx(0.5 + 1.5 / 10)


def test_an_estimate_compares_computing_with_loading() -> None:
    """Computed tokens at the prefill rate, the others at the load rate; the lookup is shown apart."""
    rates = Rates(1000.0, 1e6, lookup_s=0.5, bytes_per_token=1000)
    estimate = rates.estimate(num_tokens=2000, num_computed=500)
    assert estimate.full_s == pytest.approx(2.0)
    assert estimate.shared_s == pytest.approx(0.5 + 1.5)
    assert estimate.lookup_s == 0.5


def test_short_passes_teach_what_a_pass_costs() -> None:
    """200 tokens at 1,000 a second take 0.2 s; what is beyond that comes with every pass."""
    cost = model()
    cost.observe_prefill(200, 0.3)
    assert cost.rates.pass_s == pytest.approx(0.05)
    assert cost.rates.prefill_tokens_per_s == 1000
    cost.observe_prefill(1000, 1.05)
    assert cost.rates.prefill_tokens_per_s == pytest.approx(1000)
    for _ in range(20):
        cost.observe_prefill(200, 0.1)  # the machine is faster than believed: a pass costs nothing
    assert cost.rates.pass_s == 0


def test_passes_beyond_a_prefills_own_cost() -> None:
    rates = Rates(1000.0, 1e9, bytes_per_token=1000, pass_s=0.1)
    plan = {"num_tokens": 2000, "num_computed": 500}
    assert rates.estimate(**plan, num_passes=2).shared_s == pytest.approx(
        rates.estimate(**plan).shared_s + 0.2
    )


def test_where_a_plan_begins_to_pay() -> None:
    """At that length the estimate says so, and one token before it does not."""
    rates = Rates(10_000.0, 1e9, bytes_per_token=20_000, pass_s=0.004, num_extra_passes=1)
    length = rates.break_even(computed=0.1, min_saved_s=0.01)
    assert length is not None

    def saved(num_tokens: int) -> float:
        estimate = rates.estimate(
            num_tokens=num_tokens, num_computed=num_tokens // 10, num_passes=rates.num_extra_passes
        )
        return estimate.full_s - estimate.shared_s

    assert saved(length + 10) >= 0.01 > saved(length - 20)
    slow = Rates(10_000.0, 1e8, bytes_per_token=20_000)
    assert slow.break_even(computed=0.1, min_saved_s=0.0) is None
