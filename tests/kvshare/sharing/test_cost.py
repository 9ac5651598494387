"""The cost model: rates that follow from what is measured, whatever was assumed before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvshare.settings import load_settings
from kvshare.sharing.cost import LOAD, LOOKUP, PASS, PREFILL, CostModel, rates_of
from kvshare.sharing.rates import ANYTHING, BLOCKS, MEMORY, LoadRate, MinSaved, PrefillWork, Queue, Rates

BYTES = 131_072  # of a token's KV
# About those of an H100 with a model of 8 billion parameters.
TRUE = Rates(
    step_s=0.0087,
    token_s=1 / 48_300,
    pair_s=1.16e-9,
    pass_s=0.0115,
    reused_s=2e-7,
    loads={MEMORY: LoadRate(0.001, 1 / 55e9)},
    bytes_per_token=BYTES,
    num_extra_passes=1,
)
SETTINGS = load_settings().cost


def believed(**factors: float) -> CostModel:
    """A model whose priors are the true rates, but for factors."""
    wrong = replace(TRUE, **{name: factor * getattr(TRUE, name) for name, factor in factors.items()})
    return CostModel(wrong)


def edited(num_tokens: int, share: float) -> PrefillWork:
    """A plan with a pass that computes a share of the prompt."""
    num_computed = round(share * num_tokens)
    return PrefillWork(
        num_computed, num_computed * num_tokens / 2, num_passes=1, num_reused=num_tokens - num_computed
    )


def test_a_prefill_has_a_fixed_a_linear_and_a_quadratic_term() -> None:
    """As on the machine: 16,384 tokens take more than eight times as long as 2,048."""
    assert TRUE.full_s(2048) == pytest.approx(0.0087 + 2048 / 48_300 + 2048**2 * 5.8e-10)
    assert TRUE.full_s(16_384) > 8 * TRUE.full_s(2048)


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("rate", ["step_s", "token_s", "pair_s"])
def test_a_wrong_prior_is_forgotten_within_a_few_prefills(rate: str, factor: float) -> None:
    """Of three lengths: then any length is known within a tenth, longer ones than were seen, too."""
    cost = believed(**{rate: factor})
    for length in (512, 2048, 8192) * 4:
        cost.observe_prefill(length, TRUE.full_s(length))
    for length in (1024, 4096, 16_384, 30_000):
        assert cost.rates.full_s(length) == pytest.approx(TRUE.full_s(length), rel=0.1)


def test_a_device_that_computes_a_thousand_times_as_fast_has_fixed_costs() -> None:
    """They do not shrink with the rate of tokens: one prefill and one plan of three lengths are enough."""
    fast = replace(TRUE, token_s=8.6e-7, pair_s=9.7e-11, pass_s=0.0038, reused_s=0.0)
    cost = CostModel.from_settings(SETTINGS, bytes_per_token=BYTES, num_extra_passes=1)
    for length in (256, 2048, 8192):
        cost.observe_prefill(length, fast.full_s(length))
        cost.observe(edited(length, 0.01), fast.seconds(edited(length, 0.01)))
    for length in (256, 1024, 8192):
        assert cost.rates.full_s(length) == pytest.approx(fast.full_s(length), rel=0.05)
        work = edited(length, 0.05)
        assert cost.rates.seconds(work) == pytest.approx(fast.seconds(work), rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_all_priors_may_be_wrong(factor: float) -> None:
    """What plans take is learned from plans: 50 requests of mixed lengths are enough."""
    cost = believed(**dict.fromkeys(("step_s", "token_s", "pair_s", "pass_s", "reused_s"), factor))
    draw = np.random.default_rng(1)
    for _ in range(25):
        length, noise = int(draw.integers(256, 16_384)), draw.lognormal(0, 0.05, 2)
        cost.observe_prefill(length, TRUE.full_s(length) * noise[0])
        work = edited(length, draw.uniform(0.01, 0.3))
        cost.observe(work, TRUE.seconds(work) * noise[1])
    for length in (512, 4096, 16_384):
        for share in (0.01, 0.1):
            work = edited(length, share)
            assert cost.rates.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.2)


def test_one_length_only_is_learned_as_it_is() -> None:
    """What one length cannot tell apart stays in the proportions of the priors."""
    cost = believed(token_s=10.0)
    for _ in range(3):
        cost.observe_prefill(4096, TRUE.full_s(4096))
    assert cost.rates.full_s(4096) == pytest.approx(TRUE.full_s(4096), rel=0.02)


def test_prefills_that_were_held_up_count_little() -> None:
    """One of four took ten times as long, for whatever reason."""
    cost = CostModel(TRUE)
    for seconds in (1.0, 1.0, 10.0, 1.0):
        cost.observe_prefill(4096, seconds * TRUE.full_s(4096))
    assert cost.rates.full_s(4096) == pytest.approx(TRUE.full_s(4096), rel=0.05)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    """The last observations of each size count, and those of other sizes do not displace them."""
    cost = CostModel(TRUE)
    for factor in (1.0, 2.0):
        for length in (1024, 4096) * 8:
            cost.observe_prefill(length, factor * TRUE.full_s(length))
    assert cost.rates.full_s(4096) == pytest.approx(2 * TRUE.full_s(4096), rel=0.1)
    for _ in range(100):
        cost.observe_prefill(64, 2 * TRUE.full_s(64))
    assert cost.rates.full_s(4096) == pytest.approx(2 * TRUE.full_s(4096), rel=0.1)


def test_loads_have_a_fixed_part() -> None:
    """Small loads wait as long as larger ones for a thread and a launch."""
    cost = CostModel.from_settings(SETTINGS, bytes_per_token=BYTES)
    for num_bytes in (10**6, 10**8, 10**9) * 3:
        cost.observe_load(num_bytes, 0.003 + num_bytes / 40e9)
    load = cost.rates.loads[MEMORY]
    assert load.fixed_s == pytest.approx(0.003, rel=0.02)
    assert 1 / load.byte_s == pytest.approx(40e9, rel=0.02)


def test_each_place_has_a_rate_of_its_own() -> None:
    """Until something was copied from blocks, they are as fast as host memory."""
    cost = CostModel.from_settings(SETTINGS, bytes_per_token=BYTES, places=(MEMORY, BLOCKS))
    for num_bytes in (10**6, 10**8, 10**9) * 3:
        cost.observe_load(num_bytes, num_bytes / 40e9)
    assert cost.rates.loads[BLOCKS] == cost.rates.loads[MEMORY]
    assert cost.measured == {LOAD}
    for num_bytes in (10**6, 10**8, 10**9) * 3:
        cost.observe_load(num_bytes, num_bytes / 900e9, place=BLOCKS)
    bytes_per_s = [1 / cost.rates.loads[place].byte_s for place in (MEMORY, BLOCKS)]
    assert bytes_per_s == [pytest.approx(40e9, rel=0.02), pytest.approx(900e9, rel=0.02)]
    assert cost.measured == {LOAD, BLOCKS}


@pytest.mark.parametrize(("num_in_blocks", "bytes_per_s"), [(0, 40e9), (1000, 800e9)])
def test_a_load_takes_what_its_places_take(num_in_blocks: int, bytes_per_s: float) -> None:
    """All of it from host memory, or all from blocks."""
    loads = {MEMORY: LoadRate(0.0, 1 / 40e9), BLOCKS: LoadRate(0.0, 1 / 800e9)}
    rates = replace(TRUE, loads=loads, bytes_per_token=BYTES)
    work = PrefillWork(100, 1e5, num_reused=1000, num_in_blocks=num_in_blocks)
    assert rates.estimate(1100, work).load_s == pytest.approx(1000 * BYTES / bytes_per_s)
    assert rates.best_case(1100).load_s == pytest.approx(1099 * BYTES / 800e9)


def test_what_was_measured_is_known() -> None:
    """Until then a rate is what the settings say; nothing is learned from nothing."""
    cost = CostModel.from_settings(SETTINGS, bytes_per_token=BYTES)
    before = cost.rates
    cost.observe_load(0, 1.0)
    cost.observe_prefill(100, 0.0)
    cost.observe_lookup(100, 5.0)  # with cold caches
    assert cost.measured == frozenset()
    assert cost.rates == before
    cost.observe_prefill(1000, 0.5)
    cost.observe(edited(1000, 0.1), 0.2)
    cost.observe_load(10**9, 0.25)
    cost.observe_lookup(100, 0.001)
    assert cost.measured == {PREFILL, PASS, LOAD, LOOKUP}


def test_a_model_that_does_not_learn_keeps_its_rates() -> None:
    """As in a replay, whose results must not depend on this machine."""
    cost = CostModel(TRUE, learns=False)
    cost.observe_prefill(1000, 10.0)
    assert cost.rates == TRUE
    assert not cost.tries(LOAD)


def test_rates_are_kept_as_what_they_follow_from() -> None:
    """A restarted server goes on where the last one was."""
    cost, later = believed(token_s=10.0), believed(token_s=10.0)
    for length in (512, 4096):
        cost.observe_prefill(length, TRUE.full_s(length))
    cost.observe_load(10**9, 0.02)
    later.restore(cost.rows())
    assert later.rates == cost.rates
    assert later.measured == cost.measured


def test_a_token_that_is_attended_to_may_cost_too() -> None:
    """Latents are expanded in every pass, here at a tenth of a token: a plan saves that much less."""
    plain, latent = (
        CostModel.from_settings(SETTINGS, bytes_per_token=0, context_share=share).rates
        for share in (0.0, 1 / 9)
    )
    work = PrefillWork(500, 0.0, num_reused=1500)
    assert latent.seconds(work) - plain.seconds(work) == pytest.approx(1500 * (0.1 - 0.02) * plain.token_s)


def test_a_load_hides_behind_what_is_computed_before() -> None:
    """Only what outlasts it is waited for; other loads come first."""
    work, load_s = edited(4096, 0.1), TRUE.load_s(4096 - 410)
    idle = TRUE.estimate(4096, work)
    assert idle.shared_s == pytest.approx(TRUE.seconds(work) + load_s)
    hidden = replace(TRUE, queue=Queue(computing_s=1.0)).estimate(4096, work)
    assert hidden.shared_s == pytest.approx(TRUE.seconds(work))
    late = replace(TRUE, queue=Queue(loading_s=0.5)).estimate(4096, work)
    assert late.shared_s == pytest.approx(TRUE.seconds(work) + 0.5 + load_s)


def test_a_plan_must_save_enough_of_what_it_replaces() -> None:
    """So many seconds, and such a share of the alternative."""
    threshold = MinSaved(0.005, 0.1)
    assert threshold.pays(0.050, 0.045)
    assert not threshold.pays(0.049, 0.0445)  # 4.5 ms
    assert not threshold.pays(1.0, 0.91)  # 9 %
    assert MinSaved(-60.0).pays(1.0, 30.0)
    assert not ANYTHING.pays(1.0, 1.1)


@pytest.mark.parametrize("with_lookup", [False, True])
@pytest.mark.parametrize("computed", [0.0, 0.1])
def test_where_a_plan_begins_to_pay(computed: float, with_lookup: bool) -> None:
    """At that length the estimate says so, and one token before it does not."""
    rates, threshold = replace(TRUE, lookup=LoadRate(0.002, 1e-7)), MinSaved(0.005, 0.1)
    length = rates.break_even(computed=computed, threshold=threshold, with_lookup=with_lookup)
    assert length is not None

    def pays(num_tokens: int) -> bool:
        case = rates.best_case(num_tokens, computed=computed, with_lookup=with_lookup)
        return threshold.pays(case.full_s, case.shared_s)

    assert pays(length + 10)
    assert not pays(length - 10)
    assert 200 < length < 3000


def test_where_no_plan_ever_pays() -> None:
    """Loading is slower than computing, whatever the length."""
    slow = replace(TRUE, pair_s=0.0, loads={MEMORY: LoadRate(0.0, 1e-6)})
    assert slow.break_even(computed=0.1) is None


def test_a_rate_that_was_never_measured_is_tried() -> None:
    """Three times against its prior's advice; a measured one now and then."""
    cost = CostModel(TRUE)
    assert [cost.tries(LOAD) for _ in range(5)] == [True, True, True, False, False]
    cost.observe_load(10**9, 0.02)
    assert 1 <= sum(cost.tries(LOAD) for _ in range(256)) <= 2


def test_what_a_server_reports_gives_its_rates() -> None:
    """For an estimate on another machine."""
    assert rates_of(CostModel(TRUE).document(ANYTHING)).full_s(5000) == pytest.approx(TRUE.full_s(5000))


def test_what_takes_as_long_as_expected_changes_no_rate() -> None:
    """Rates are computed anew where they are off, else seldom: a request waits for that."""
    cost = CostModel(TRUE)
    for _ in range(8):
        cost.observe_prefill(4096, TRUE.full_s(4096))
    before = cost.rates
    cost.observe_prefill(4096, 1.05 * TRUE.full_s(4096))
    assert cost.rates is before
    cost.observe_prefill(4096, 1.5 * TRUE.full_s(4096))
    assert cost.rates is not before


def test_planning_is_learned_by_itself() -> None:
    """Searches that find nothing are not followed by it, and must not make it seem short."""
    cost = believed()
    for _ in range(8):
        cost.observe_lookup(4096, 0.001)
        cost.observe_lookup(4096, 0.001, planning_s=0.006)
    assert cost.rates.lookup.seconds(4096) == pytest.approx(0.001, rel=0.05)
    assert cost.rates.planning.seconds(4096) == pytest.approx(0.006, rel=0.05)
    assert cost.rates.lookup_s(4096) == pytest.approx(0.007, rel=0.05)
