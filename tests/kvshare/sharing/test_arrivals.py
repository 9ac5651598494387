"""Who waits for whom, for how long, and who does not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.reasons import Reason
from kvshare.requests import SharingMode
from kvshare.sharing.arrivals import Arrivals
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan

TOKENS = token_ids(np.random.default_rng(0).integers(0, 30_000, 400))
STRANGER = token_ids(np.random.default_rng(1).integers(0, 30_000, 400))


def edited(tokens: TokenIds, *places: int) -> TokenIds:
    changed = np.array(tokens)
    changed[list(places)] += 1
    return token_ids(changed)


class Finder:
    """Finds nothing, and counts how often it was asked."""

    def __init__(self) -> None:
        self.num_lookups = 0

    async def __call__(self) -> Lookup:
        self.num_lookups += 1
        return Lookup(NoPlan(Reason.NO_CANDIDATES))


async def waited(
    arrivals: Arrivals,
    tokens: TokenIds,
    *,
    mode: SharingMode = SharingMode.APPROX,
    namespace: str = "ns",
) -> tuple[Lookup, int]:
    finder = Finder()
    waited = await arrivals.waited(
        [namespace], tokens, mode, finder, num_reused=lambda lookup: lookup.report(len(tokens)).num_cached
    )
    return waited.result.after_waiting(waited.seconds), finder.num_lookups


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(min_run=16)


async def test_one_that_is_alike_is_waited_for_and_then_looked_up_again(arrivals: Arrivals) -> None:
    first = arrivals.begin("ns", TOKENS)
    waiting = asyncio.create_task(waited(arrivals, edited(TOKENS, 5, 200)))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    arrivals.end(first)
    lookup, num_lookups = await asyncio.wait_for(waiting, 60)
    assert num_lookups == 2
    assert lookup.stage_seconds["wait"] >= 0.05
    assert len(arrivals) == 0


@pytest.mark.parametrize(
    ("tokens", "mode", "namespace"),
    [
        (STRANGER, SharingMode.APPROX, "ns"),
        (edited(TOKENS, 5), SharingMode.EXACT, "ns"),  # its first tokens differ: exact reuse has nothing
        (edited(TOKENS, *range(0, 400, 16)), SharingMode.APPROX, "ns"),  # no run is long enough
        (edited(TOKENS, 5), SharingMode.APPROX, "another"),
    ],
    ids=["a stranger", "exact only", "nothing but short runs", "another namespace"],
)
async def test_nobody_else_is_waited_for(
    arrivals: Arrivals, tokens: TokenIds, mode: SharingMode, namespace: str
) -> None:
    arrivals.begin("ns", TOKENS)
    lookup, num_lookups = await asyncio.wait_for(waited(arrivals, tokens, mode=mode, namespace=namespace), 60)
    assert num_lookups == 1
    assert "wait" not in lookup.stage_seconds


async def test_an_equal_beginning_is_worth_it_in_exact_mode(arrivals: Arrivals) -> None:
    first = arrivals.begin("ns", TOKENS)
    waiting = asyncio.create_task(waited(arrivals, edited(TOKENS, 390), mode=SharingMode.EXACT))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    arrivals.end(first)
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize(
    ("length", "remaining", "waits"), [(400, 400, True), (400, 90, True), (100, 390, False)]
)
async def test_no_more_is_waited_for_than_half_of_the_own_prefill(
    arrivals: Arrivals, length: int, remaining: int, waits: bool
) -> None:
    """Counted in tokens that the engine computes; beside one other the own prefill takes twice as long."""
    first = arrivals.begin("ns", TOKENS)
    first.remaining = lambda: remaining
    waiting = asyncio.create_task(waited(arrivals, TOKENS[:length]))
    await asyncio.sleep(0.05)
    assert waiting.done() != waits
    arrivals.end(first)
    await asyncio.wait_for(waiting, 60)


async def test_what_is_computed_and_cannot_be_stored_is_given_up(
    arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvshare.sharing.arrivals._STORING_S", 0.1)
    arrivals.begin("ns", TOKENS).remaining = lambda: 0  # and never over
    lookup, num_lookups = await asyncio.wait_for(waited(arrivals, edited(TOKENS, 5)), 60)
    assert num_lookups == 1
    assert lookup.stage_seconds["wait"] >= 0.1


async def test_who_is_next_is_waited_for_when_the_first_has_given_up(arrivals: Arrivals) -> None:
    """The first failed: of those that waited one is computed, and the others wait for that one."""
    first = arrivals.begin("ns", TOKENS)
    order: list[str] = []

    async def served(name: str, tokens: TokenIds) -> None:
        await waited(arrivals, tokens)
        own = arrivals.begin("ns", tokens)
        order.append(name)
        await asyncio.sleep(0.05)
        arrivals.end(own)

    tasks = [asyncio.create_task(served(name, edited(TOKENS, n))) for n, name in enumerate("abc")]
    await asyncio.sleep(0.02)
    assert order == []
    arrivals.end(first)
    arrivals.end(first)  # twice does nothing
    await asyncio.sleep(0.02)
    assert len(order) == 1
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert sorted(order) == ["a", "b", "c"]


async def test_who_goes_away_while_waiting_leaves_nothing_behind(arrivals: Arrivals) -> None:
    first = arrivals.begin("ns", TOKENS)
    waiting = asyncio.create_task(waited(arrivals, edited(TOKENS, 5)))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(arrivals) == 1
    arrivals.end(first)
    assert len(arrivals) == 0


async def test_what_is_refused_once_is_not_waited_for_again(arrivals: Arrivals) -> None:
    """The first is stored, and the lookup refuses it: the second, just like it, would be refused as well."""
    first, second = arrivals.begin("ns", TOKENS), arrivals.begin("ns", edited(TOKENS, 7))
    waiting = asyncio.create_task(waited(arrivals, edited(TOKENS, 5)))
    await asyncio.sleep(0.02)
    arrivals.end(first, stored=True)
    lookup, num_lookups = await asyncio.wait_for(waiting, 60)
    assert num_lookups == 2
    assert lookup.report(400).num_cached == 0
    arrivals.end(second)
