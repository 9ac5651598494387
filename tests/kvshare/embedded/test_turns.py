"""Whose turn it is to compute: by arrival within a tenant, by what tenants were served among them."""

from __future__ import annotations

from collections import Counter

import pytest

from kvshare.embedded.turns import Turns


def tenant_of(request: str) -> str:
    return request[0]


def served(turns: Turns[str], number: int, *, goes_on: bool = True, seconds: float = 0.025) -> list[str]:
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
    turns = Turns(tenant_of)
    for request in ("a1", "a2", "a3"):
        turns.add(request)
    assert served(turns, 7) == ["a1", "a2", "a3", "a1", "a2", "a3", "a1"]


def test_tenants_get_equal_shares_however_many_requests_they_have() -> None:
    turns = Turns(tenant_of)
    for request in ("a1", "a2", "a3", "a4", "b1"):
        turns.add(request)
    counts = Counter(tenant_of(request) for request in served(turns, 40))
    assert counts == {"a": 20, "b": 20}


def test_who_asks_for_little_is_served_first() -> None:
    """A few requests that come at once: before the next turn of a tenant that has been served all along."""
    turns = Turns(tenant_of)
    turns.add("a1")
    served(turns, 400)
    for request in ("b1", "b2", "b3", "b4"):
        turns.add(request)
    assert served(turns, 4, goes_on=False) == ["b1", "b2", "b3", "b4"]
    assert served(turns, 2) == ["a1", "a1"]


def test_a_newcomer_is_ahead_for_a_fifth_of_a_second() -> None:
    """Those who were served for ten seconds do not wait until it has had as much."""
    turns = Turns(tenant_of)
    turns.add("a1")
    served(turns, 400)
    turns.add("b1")
    taken = served(turns, 100)
    assert taken.index("a1") == pytest.approx(8, abs=1)  # of 25 ms
    assert taken[20:].count("a1") == pytest.approx(40, abs=2)


def test_idle_tenants_are_forgotten() -> None:
    turns = Turns(tenant_of)
    for number in range(100):
        turns.add(f"{chr(200 + number)}")
        served(turns, 1, goes_on=False)
    turns.add("a")
    served(turns, 100)
    assert len(turns._served) == 1


def test_taking_without_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Turns(tenant_of).take()
