"""Whose turn it is to compute: by arrival within a tenant, by what tenants were served among them."""

from __future__ import annotations

from collections import Counter

import pytest

from kvshare.embedded.turns import TenantTurns


def tenant_of(request: str) -> str:
    return request[0]


def decoding() -> TenantTurns[str]:
    return TenantTurns(tenant_of, lambda _: None)


def prefilling(**left: int) -> TenantTurns[str]:
    """Of each tenant, the tokens of its requests' prefills."""
    return TenantTurns(tenant_of, lambda request: left[tenant_of(request)])


def served(
    turns: TenantTurns[str], number: int, *, goes_on: bool = True, seconds: float = 0.025
) -> list[str]:
    """The next requests in order; each is ready for another turn after its own."""
    taken = []
    for _ in range(number):
        request = turns.take()
        taken.append(request)
        if goes_on:
            turns.add(request)
        turns.note(tenant_of(request), seconds)
    return taken


def test_requests_of_one_tenant_take_turns() -> None:
    turns = prefilling(a=1)
    for request in ("a1", "a2", "a3"):
        turns.add(request)
    assert served(turns, 7) == ["a1", "a2", "a3", "a1", "a2", "a3", "a1"]


@pytest.mark.parametrize("turns", [decoding(), prefilling(a=100, b=100), prefilling(a=100, b=1000)])
def test_tenants_get_equal_shares_however_many_requests_they_have(turns: TenantTurns[str]) -> None:
    """But for the fifth of a second by which one with shorter prompts may be ahead."""
    for request in ("a1", "a2", "a3", "a4", "b1"):
        turns.add(request)
    served(turns, 8)
    counts = Counter(tenant_of(request) for request in served(turns, 40))
    assert counts["a"] == pytest.approx(20, abs=1)


def test_short_prompts_do_not_wait_for_each_turn_of_a_long_one() -> None:
    """A few that come at once, whatever their tenant was served before."""
    turns = prefilling(a=200, b=16)
    turns.add("b0")
    served(turns, 40)
    served(turns, 1, goes_on=False)
    turns.add("a1")
    for request in ("b1", "b2", "b3", "b4"):
        turns.add(request)
    assert served(turns, 4, goes_on=False) == ["b1", "b2", "b3", "b4"]
    assert served(turns, 2) == ["a1", "a1"]


def test_short_prompts_are_ahead_by_a_fifth_of_a_second_only() -> None:
    turns = prefilling(a=200, b=16)
    for request in ("a1", "b1"):
        turns.add(request)
    taken = served(turns, 100)
    assert taken.index("a1") == pytest.approx(8, abs=1)  # of 25 ms
    assert taken[20:].count("a1") == pytest.approx(40, abs=2)


def test_a_pause_gives_no_claim_on_the_time_that_others_had() -> None:
    turns = decoding()
    turns.add("a1")
    served(turns, 400)
    turns.add("b1")
    assert Counter(served(turns, 20)) == {"a1": 10, "b1": 10}


def test_idle_tenants_are_forgotten() -> None:
    turns = decoding()
    for number in range(100):
        turns.add(f"{chr(200 + number)}")
        served(turns, 1, goes_on=False)
    turns.add("a")
    served(turns, 100)
    assert len(turns._served) == 1


def test_taking_without_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        decoding().take()
