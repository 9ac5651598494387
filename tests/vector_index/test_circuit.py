"""The circuit breaker: time limits, opening, the trial call, closing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from vector_index.circuit import Circuit, CircuitState, Failure, FailureReason
from vector_index.errors import IndexUnavailableError


class Clock:
    """A clock that the test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def works() -> str:
    return "fine"


async def breaks() -> str:
    raise OSError("no route")


async def hangs() -> str:
    return await asyncio.sleep(60, "late")


def circuit(clock: Clock) -> Circuit:
    return Circuit("part", failures_to_open=2, open_s=10.0, clock=clock)


async def attempt(part: Circuit, call: Callable[[], Awaitable[str]]) -> str | Failure:
    return await part.attempt(call, timeout_s=1.0)


async def test_a_working_call_gives_its_result() -> None:
    """Nothing stands between a caller and a part that works."""
    assert await attempt(circuit(Clock()), works) == "fine"


async def test_an_exception_becomes_a_failure() -> None:
    """The failure names the part and the reason, in our own words only."""

    async def refuses() -> str:
        raise IndexUnavailableError("not open")

    part = circuit(Clock())
    refused, broken = await attempt(part, refuses), await attempt(part, breaks)
    assert refused == broken == Failure("part", FailureReason.ERROR)
    assert isinstance(refused, Failure)
    assert isinstance(broken, Failure)
    assert (refused.detail, broken.detail) == ("IndexUnavailableError: not open", "OSError")


async def test_a_slow_call_is_given_up_in_time() -> None:
    """A call that hangs costs its time limit, not more."""
    started = asyncio.get_running_loop().time()
    failure = await circuit(Clock()).attempt(lambda: asyncio.sleep(60, "late"), timeout_s=0.05)
    assert failure == Failure("part", FailureReason.TIMEOUT)
    assert isinstance(failure, Failure)
    assert failure.detail == "no answer within 0.05 s"
    assert asyncio.get_running_loop().time() - started < 1.0


async def test_the_circuit_opens_after_failures_in_a_row() -> None:
    """Two failures open it; a success in between starts the count again."""
    part = circuit(Clock())
    await attempt(part, breaks)
    await attempt(part, works)
    await attempt(part, breaks)
    states = [part.state]
    await attempt(part, breaks)
    states.append(part.state)
    assert states == [CircuitState.CLOSED, CircuitState.OPEN]
    assert await attempt(part, works) == Failure("part", FailureReason.CIRCUIT_OPEN)


async def test_a_good_trial_call_closes_the_circuit() -> None:
    """After the wait one call is let through, and its success lets all others through."""
    clock = Clock()
    part = circuit(clock)
    for _ in range(2):
        await attempt(part, breaks)
    clock.now = 10.0
    assert await attempt(part, works) == "fine"
    await attempt(part, breaks)
    assert part.state is not CircuitState.OPEN


async def test_the_log_has_one_line_when_a_part_fails_and_one_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not one for each call; the first says why and what happens now."""
    clock = Clock()
    part = circuit(clock)
    states = []
    for now in (0.0, 0.0, 1.0, 10.0, 11.0, 20.0):
        clock.now = now
        states.append(part.state)
        await attempt(part, breaks)
    clock.now = 30.0
    await attempt(part, works)
    await attempt(part, works)
    closed, is_open, half_open = CircuitState
    assert states == [closed, closed, is_open, half_open, is_open, half_open]
    assert part.state is closed
    assert [record.getMessage() for record in caplog.records] == [
        "part of the index failed 2 times in a row, the last time: OSError. Prompts are served without it; "
        "it is tried again every 10 s. If that lasts, restart this server",
        "part of the index works again: prompts are served with it",
    ]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ("ll", "was late 2 times in a row (no answer within 0 s) and raised no error"),
        ("le", "failed 2 times in a row (1 of them late), the last time: OSError"),
        ("ee", "failed 2 times in a row, the last time: OSError"),
        ("lgee", "failed 2 times in a row, the last time: OSError"),
    ],
)
async def test_the_log_tells_load_from_errors(
    calls: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls that were late, that raised, and that were good, in their order."""
    part = circuit(Clock())
    for call in calls:
        limit_s = 0 if call == "l" else 60
        await part.attempt({"l": hangs, "e": breaks, "g": works}[call], timeout_s=limit_s)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"part of the index {told}")


async def test_a_bad_trial_call_keeps_the_circuit_open() -> None:
    """One failed trial is enough for another wait."""
    clock = Clock()
    part = circuit(clock)
    for _ in range(2):
        await attempt(part, breaks)
    clock.now = 10.0
    await attempt(part, breaks)
    clock.now = 19.0
    assert part.state is CircuitState.OPEN
    clock.now = 20.0
    assert part.state is not CircuitState.OPEN


async def test_only_one_trial_call_goes_through() -> None:
    """While the trial is undecided others are refused; a cancelled trial is not the last one."""
    clock = Clock()
    part = circuit(clock)
    for _ in range(2):
        await attempt(part, breaks)
    clock.now = 10.0
    trial = asyncio.create_task(part.attempt(lambda: asyncio.sleep(60, "late"), timeout_s=60))
    await asyncio.sleep(0)
    assert await attempt(part, works) == Failure("part", FailureReason.CIRCUIT_OPEN)
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    clock.now = 20.0
    assert await attempt(part, works) == "fine"
