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
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        async with admission.slot():
            pass
    tasks[1].cancel()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "c"]
    assert (admission.num_running, admission.num_waiting) == (0, 0)
