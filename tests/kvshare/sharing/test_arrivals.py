"""Who waits for whom, for how long, and who does not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.requests import SharingMode
from kvshare.sharing.arrivals import Arrivals
from kvshare.sharing.pipeline import Lookup
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
        return Lookup(NoPlan("no_candidates"))


async def waited(
    arrivals: Arrivals,
    tokens: TokenIds,
    *,
    mode: SharingMode = SharingMode.APPROX,
    prefill_s: float = 10.0,
    namespace: str = "ns",
) -> tuple[Lookup, int]:
    finder = Finder()
    lookup = await arrivals.waited(namespace, tokens, mode, finder, prefill_s=prefill_s)
    return lookup, finder.num_lookups


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(min_run=16)


async def test_one_that_is_alike_is_waited_for_and_then_looked_up_again(arrivals: Arrivals) -> None:
    first = arrivals.begin("ns", TOKENS)
    waiting = asyncio.create_task(waited(arrivals, edited(TOKENS, 5, 200)))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    arrivals.end(first)
    lookup, num_lookups = await asyncio.wait_for(waiting, 1)
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
    lookup, num_lookups = await asyncio.wait_for(waited(arrivals, tokens, mode=mode, namespace=namespace), 1)
    assert num_lookups == 1
    assert "wait" not in lookup.stage_seconds


async def test_an_equal_beginning_is_worth_it_in_exact_mode(arrivals: Arrivals) -> None:
    first = arrivals.begin("ns", TOKENS)
    waiting = asyncio.create_task(waited(arrivals, edited(TOKENS, 390), mode=SharingMode.EXACT))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    arrivals.end(first)
    await asyncio.wait_for(waiting, 1)


async def test_a_wait_takes_half_of_the_own_prefill_at_most(arrivals: Arrivals) -> None:
    """Beside one other it would take twice as long: as long as it would be alone, and what storing takes."""
    arrivals.begin("ns", TOKENS)  # never ends
    began = asyncio.get_running_loop().time()
    lookup, num_lookups = await waited(arrivals, edited(TOKENS, 5), prefill_s=0.2)
    took = asyncio.get_running_loop().time() - began
    assert 0.24 <= took < 0.5
    assert num_lookups == 1
    assert lookup.stage_seconds["wait"] == pytest.approx(took, abs=0.05)


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
    await asyncio.wait_for(asyncio.gather(*tasks), 2)
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
