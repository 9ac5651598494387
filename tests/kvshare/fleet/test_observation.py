"""What a finished request of a replica teaches about costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delta_tree import Copy, NodeId, SegmentId, Span
from kvshare.fleet.observation import observe
from kvshare.fleet.routed_request import RequestProgress, Routed
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.plan import Plan
from kvshare.sharing.rates import BLOCKS, DISK, MEMORY, Estimate, Rates
from kvshare.sharing.waits import Waits
from kvshare.vllm_protocol.messages import FinishedReport, Ticket, WireCopy
from tests.kvshare.fleet.reports import prompt, request

FULL = FinishedReport("r", "full", None, num_computed=1000, first_token_s=0.4)


def observed(progress: RequestProgress, finished: FinishedReport) -> list[tuple[Any, ...]]:
    """The prefills that the cost model has learned from."""
    cost = CostModel.from_settings(load_settings().cost, bytes_per_token=100, num_extra_passes=1)
    observe(cost, request(prompt(1, 1000)).routed, progress, finished)
    return [(kind, features[1], seconds) for kind, features, seconds in cost.rows()["work"]]


def test_a_streamed_answer_is_timed_where_it_arrives() -> None:
    """With all that is on the way."""
    progress = RequestProgress(was_alone=True, prefill_s=0.5)
    assert observed(progress, FULL) == [("prefill", 1000, 0.5)]


def test_an_answer_that_is_not_streamed_is_timed_by_the_connector() -> None:
    """Its first token does not arrive before its last one."""
    assert observed(RequestProgress(was_alone=True), FULL) == [("prefill", 1000, 0.4)]


@pytest.mark.parametrize("prefill_s", [None, 0.5])
def test_a_prefill_next_to_others_is_not_learned_from(prefill_s: float | None) -> None:
    """Whoever timed it."""
    assert observed(RequestProgress(was_alone=False, prefill_s=prefill_s), FULL) == []


@pytest.mark.parametrize(
    ("num_from_blocks", "expected"),
    [
        (0, {MEMORY: [(80_000, 0.2)], BLOCKS: []}),
        (800, {MEMORY: [], BLOCKS: [(80_000, 0.02)]}),
        (300, {MEMORY: [(50_000, 0.2)], BLOCKS: [(30_000, 0.02)]}),
    ],
)
def test_each_place_is_taught_by_what_came_from_it(
    num_from_blocks: int, expected: dict[str, list[tuple[float, float]]]
) -> None:
    """A load can come from both."""
    cost = CostModel.from_settings(
        load_settings().cost, bytes_per_token=100, num_extra_passes=1, places=(MEMORY, BLOCKS)
    )
    ticket = Ticket("r", "n", "d", 1000, copies=(WireCopy(SegmentId(1), 0, 800, 0, 0),), exact_length=800)
    seconds = {"verify": 0.1, "write": 0.1, "blocks": 0.02}
    finished = FinishedReport(
        "r", "exact", None, used=(0,), num_from_blocks=num_from_blocks, stage_seconds=seconds
    )
    observe(cost, Routed(ticket=ticket), RequestProgress(), finished)
    rows = {place: [(row[1][1], row[2]) for row in cost.rows()[place]] for place in (MEMORY, BLOCKS)}
    assert rows == expected


def test_reads_that_were_late_are_learned_from() -> None:
    """All of them at the pace of those that came in time: the disk has become slower."""
    cost = CostModel.from_settings(load_settings().cost, bytes_per_token=100)
    seconds = {"write": 0.1, "disk": 0.5}
    finished = FinishedReport(
        "r", "approx", "kv_late", disk_bytes=10_000, late_bytes=30_000, stage_seconds=seconds
    )
    observe(cost, Routed(ticket=Ticket("r", "n", "d", 1000)), RequestProgress(), finished)
    assert [(row[1][1], row[2]) for row in cost.rows()[DISK]] == [(40_000, 2.0)]


def test_reads_from_disk_are_learned_from() -> None:
    """By their bytes and their seconds; before the first of them there is no such place."""
    cost = CostModel.from_settings(load_settings().cost, bytes_per_token=100)
    assert DISK not in cost.rates.loads
    ticket = Ticket("r", "n", "d", 1000, copies=(WireCopy(SegmentId(1), 0, 800, 0, 0),), exact_length=800)
    seconds = {"write": 0.1, "disk": 0.4}
    finished = FinishedReport("r", "exact", None, used=(0,), disk_bytes=80_000, stage_seconds=seconds)
    observe(cost, Routed(ticket=ticket), RequestProgress(), finished)
    assert [(row[1][1], row[2]) for row in cost.rows()[DISK]] == [(80_000, 0.4)]
    assert cost.rates.loads[DISK].seconds(80_000) > cost.rates.loads[MEMORY].seconds(80_000)


@pytest.mark.parametrize(
    ("stages", "compute_s"), [({}, 0.3), ({"hidden": 0.15, "waited": 0.001}, 0.45), ({"ahead": 0.1}, 0.4)]
)
def test_copying_beside_a_pass_is_no_time_of_its_own(stages: dict[str, float], compute_s: float) -> None:
    """What was computed is the rest of the time; the copies' rate is that of all of their time."""
    cost = CostModel.from_settings(load_settings().cost, bytes_per_token=100, num_extra_passes=1)
    copies = (Copy(NodeId(1), SegmentId(1), 0, 800, 0, 0, 0),)
    plan = Plan(1000, 0, copies, (Span(800, 1000),), (), 1, Estimate(1.0, 0.5))
    ticket = Ticket("r", "n", "d", 1000, copies=(WireCopy(SegmentId(1), 0, 800, 0, 0),))
    routed = Routed(ticket=ticket, plan=plan)
    finished = FinishedReport(
        "r", "approx", None, used=(0,), first_token_s=0.5, stage_seconds={"write": 0.2, **stages}
    )
    observe(cost, routed, RequestProgress(was_alone=True, prefill_s=0.5), finished)
    rows = cost.rows()
    assert [seconds for _, _, seconds in rows["work"]] == [pytest.approx(compute_s)]
    assert [seconds for _, _, seconds in rows[MEMORY]] == [0.2]


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token_s": None},  # of an older connector, or preempted
        {"num_local": 16},  # vLLM's own prefix cache had some of it
    ],
)
def test_a_prefill_of_unknown_work_or_time_is_not_learned_from(changes: dict[str, Any]) -> None:
    """It would teach a wrong rate."""
    assert observed(RequestProgress(was_alone=True), replace(FULL, **changes)) == []


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (RequestProgress(prefill_s=3.0, queue_s=1.0), [(False, 1.0, 2.0)]),  # it computed for 1 s
        (RequestProgress(prefill_s=3.0), []),  # nobody knows how long its queue was
        (RequestProgress(queue_s=1.0), []),  # not streamed
    ],
)
def test_the_wait_of_a_prompt_beside_others_is_learned(
    progress: RequestProgress, expected: list[tuple[bool, float, float]]
) -> None:
    """All beyond what its own prefill takes by the rates."""
    cost = CostModel(Rates.linear(1000.0, 1e9))
    cost.waits = waits = _SeenWaits()
    observe(cost, request(prompt(1, 1000)).routed, progress, FULL)
    assert waits.seen == expected


class _SeenWaits(Waits):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, float, float]] = []

    def observe(self, *, shared: bool, queue_s: float, seconds: float) -> None:
        self.seen.append((shared, queue_s, round(seconds, 6)))
        super().observe(shared=shared, queue_s=queue_s, seconds=seconds)
