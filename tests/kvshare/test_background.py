"""Work after an answer: owned, awaited, bounded; its failures are logged and nobody else's."""

import asyncio

import pytest

from kvshare.background import Background
from kvshare.embedded.admission import Admission
from kvshare.errors import OverloadedError


async def test_the_next_request_of_a_namespace_waits_for_it_and_others_do_not() -> None:
    """Only what was spawned for the namespace counts, and only for so long."""
    background, release = Background(), asyncio.Event()

    async def work() -> None:
        await release.wait()

    background.spawn(work(), namespace="a")
    await asyncio.wait_for(background.caught_up("b", timeout_s=3600), timeout=60)
    await background.caught_up("a", timeout_s=0.01)
    assert len(background) == 1
    release.set()
    await asyncio.wait_for(background.caught_up("a", timeout_s=3600), timeout=60)
    assert len(background) == 0


async def test_what_waits_is_bounded_for_those_who_ask() -> None:
    """`below` returns once enough has ended."""
    background, releases = Background(), [asyncio.Event() for _ in range(3)]
    for release in releases:
        background.spawn(release.wait())  # type: ignore[arg-type]  # returns True, which nobody reads
    waiting = asyncio.create_task(background.wait_below(2))
    await asyncio.sleep(0)
    releases[0].set()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    releases[1].set()
    await asyncio.wait_for(waiting, timeout=60)
    releases[2].set()
    await background.settle()


async def test_a_failure_is_logged_and_ends_there(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody awaits this work, so nobody else would tell."""
    background = Background()

    async def work() -> None:
        raise ValueError("odd")

    background.spawn(work())
    await background.settle()
    assert "ValueError" in caplog.text


async def test_slots_are_given_in_order_and_the_queue_is_bounded() -> None:
    """Two wait for one slot, a third is refused; whoever came first runs first."""
    admission, order = Admission(max_running=1, max_waiting=2), []

    async def run(name: str, release: asyncio.Event) -> None:
        async with admission.slot():
            order.append(name)
            await release.wait()

    release = asyncio.Event()
    tasks = []
    for name in "abc":
        tasks.append(asyncio.create_task(run(name, release)))
        await asyncio.sleep(0)
    assert (admission.num_running, admission.num_waiting) == (1, 2)
    with pytest.raises(OverloadedError, match="the queue of requests is full"):
        async with admission.slot():
            pass
    tasks[1].cancel()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "c"]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def _admitted(admission: Admission, *tenants: str) -> tuple[list[str], list[str]]:
    """Of requests that come in this order, named by tenant: which run, in order, and which are refused."""
    order: list[str] = []
    refused: list[str] = []

    async def run(name: str, release: asyncio.Event) -> None:
        try:
            async with admission.slot(name[0]):
                order.append(name)
                await release.wait()
        except OverloadedError:
            refused.append(name)

    release = asyncio.Event()
    tasks = []
    for name in tenants:
        tasks.append(asyncio.create_task(run(name, release)))
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks)
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    return order, refused


async def test_a_client_that_leaves_costs_nobody_else_an_error() -> None:
    """Its place is given away in the turn in which it leaves, before its own task runs."""
    admission = Admission(max_running=1, max_waiting=2)

    async def ask(tenant: str) -> None:
        async with admission.slot(tenant):
            pass

    async with admission.slot("a"):
        waiting = [asyncio.create_task(ask("a")) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[-1].cancel()
        other = asyncio.create_task(ask("b"))
        await asyncio.sleep(0)
        assert not other.done()
    await asyncio.wait_for(other, timeout=60)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_free_slot_goes_to_the_tenant_with_fewest_running_requests() -> None:
    """One that came later does not wait for all of the others' requests."""
    admission = Admission(max_running=2, max_waiting=9)
    order, refused = await _admitted(admission, "a1", "a2", "a3", "a4", "b1", "b2")
    assert order[:3] == ["a1", "a2", "b1"] or order[:4] == ["a1", "a2", "a3", "b1"]
    assert order.index("b2") < order.index("a4")
    assert refused == []


async def test_a_full_queue_has_room_for_a_tenant_with_less_in_it() -> None:
    """The one with most waiting requests loses its last; nobody pushes out its own, or one with as many."""
    admission = Admission(max_running=1, max_waiting=4)
    order, refused = await _admitted(admission, "a1", "a2", "a3", "a4", "a5", "b1", "b2", "b3", "a6")
    assert sorted(refused) == ["a4", "a5", "a6", "b3"]
    assert sorted(order) == ["a1", "a2", "a3", "b1", "b2"]


async def test_requests_that_are_cancelled_leave_no_slot_taken() -> None:
    """Also one that gets its slot at the moment at which its client goes away."""
    admission = Admission(max_running=1, max_waiting=4)

    async def run(release: asyncio.Event) -> None:
        async with admission.slot("a"):
            await release.wait()

    release = asyncio.Event()
    first, second, third = (asyncio.create_task(run(release)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    second.cancel()
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    async with admission.slot("b"):
        assert admission.num_running == 1
