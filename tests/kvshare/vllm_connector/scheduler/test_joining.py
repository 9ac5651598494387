"""Which loads join a step, by what steps and copies took before. Time is the test's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.joining import Joining

GIB = 2**30
PREFILL_S, DECODE_S = 0.2, 0.006


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from kvshare.vllm_connector.scheduler import joining

    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    return clock


@pytest.fixture
def joining(clock: Clock) -> Joining:
    """It has seen steps of 8,192 tokens and of one, and a load of 50 GiB a second."""
    from kvshare.vllm_connector.metadata import LoadResult
    from kvshare.vllm_connector.scheduler.joining import Joining

    made = Joining(step_tokens=1000)
    for number, (num_tokens, seconds) in enumerate(
        [(8192, PREFILL_S), (1, DECODE_S), (8192, PREFILL_S + 0.1)]
    ):
        made.note_step(number, num_tokens)
        clock.now += seconds
        made.note_end(number)
    made.note_load("seen", GIB, 0, may_join=True)
    made.note_copied("seen", 0.02)
    made.note_result("seen", LoadResult())
    return made


def plan(joining: Joining, num_tokens: int) -> None:
    joining.note_step(10, num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "gib", "num_placeholders", "joins"),
    [
        (8192, 7, 10, True),  # .14 s, with a margin of a quarter, beside at least .2 s
        (8192, 8, 10, False),
        (8191, 1, 10, False),  # none of half as many tokens was seen: it takes at least as long as one of one
        (8192, 1, 1000, True),
        (8192, 1, 1001, False),  # more than a step may compute
        (3, 1, 10, False),  # others only decode
        (0, 1, 10, False),  # nothing is in flight
    ],
)
def test_a_load_joins_if_it_arrives_before_the_gpu_is_there(
    joining: Joining, num_tokens: int, gib: int, num_placeholders: int, joins: bool
) -> None:
    """By the slowest copies and the shortest steps that were seen."""
    plan(joining, num_tokens)
    assert joining.take(gib * GIB, num_placeholders) == joins


@pytest.mark.parametrize(
    ("num_bytes", "num_placeholders", "in_flight", "under_way", "joins"),
    [
        (0, 10, False, None, True),
        (1, 10, False, None, False),  # read from host memory
        (0, 1001, False, None, False),
        (0, 10, True, None, True),  # the GPU decodes for longer than that
        (0, 10, False, 0, True),  # another one from blocks, of the same step
        (0, 10, False, GIB, False),
    ],
)
def test_a_load_from_blocks_joins_the_step_of_an_idle_gpu(
    joining: Joining,
    num_bytes: int,
    num_placeholders: int,
    in_flight: bool,
    under_way: int | None,
    joins: bool,
) -> None:
    """Nothing else is slowed, and vLLM need not hear of its end first."""
    if in_flight:
        plan(joining, 1)
    if under_way is not None:
        joining.note_load("other", under_way, 0, may_join=True)
    assert joining.take(num_bytes, num_placeholders) == joins


def test_a_load_from_blocks_is_never_late(joining: Joining) -> None:
    """The device waits for its copies, and that says nothing about those from host memory."""
    from kvshare.vllm_connector.metadata import LoadResult

    joining.note_load("x", 0, 0, may_join=True)
    joining.note_result("x", LoadResult(late_s=5.0))
    plan(joining, 8192)
    assert joining.take(GIB, 0)


def test_what_the_gpu_has_done_of_a_step_is_not_left(joining: Joining, clock: Clock) -> None:
    """The longer it runs, the less fits."""
    plan(joining, 8192)
    clock.now += 0.1
    assert joining.take(3 * GIB, 0)
    assert not joining.take(4 * GIB, 0)


def test_a_load_waits_for_those_before_it(joining: Joining) -> None:
    """Copies follow each other."""
    plan(joining, 8192)
    joining.note_load("a", 4 * GIB, 0, may_join=False)
    assert joining.take(3 * GIB, 0)
    assert not joining.take(4 * GIB, 0)


def test_loads_are_announced_that_arrive_during_the_steps_in_flight(joining: Joining) -> None:
    """Once, in the order in which they began, if they may join and fit what a step may compute."""
    joining.note_load("order", GIB, 0, may_join=False)
    for name in "abc":
        joining.note_load(name, GIB, 400, may_join=True)
    assert joining.take_arriving() == ()
    plan(joining, 8192)
    assert joining.take_arriving() == ("a", "b")
    assert joining.take_arriving() == ()
    joining.note_due(["a"])
    assert joining.take_arriving() == ("c",)


def test_what_came_late_is_added_to_the_margin(joining: Joining) -> None:
    """Until eight other loads were not late."""
    from kvshare.vllm_connector.metadata import LoadResult

    plan(joining, 8192)
    for number, late_s in enumerate([0.05, *[0.0] * 8]):
        joining.note_load("x", 1, 0, may_join=True)
        joining.note_result("x", LoadResult(late_s=late_s))
        assert joining.take(6 * GIB, 0) == (number == 8)


@pytest.mark.parametrize("why", ["never loaded", "failed", "one step in flight"])
def test_none_joins(joining: Joining, why: str) -> None:
    """Without a rate, after a failure, and where nothing is gained."""
    plan(joining, 8192)
    assert joining.take(GIB, 1)
    changed: dict[str, Any] = {"one step in flight": {"step_tokens": 0}, "failed": {"_has_failed": True}}
    for name, value in changed.get(why, {}).items():
        setattr(joining, name, value)
    if why == "never loaded":
        joining._per_byte.clear()
    assert not joining.take(GIB, 1)
