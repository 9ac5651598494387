"""Which saves take long, as far as earlier ones tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.stages import SAVE

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.save_pace import SavePace

TOKENS_PER_S = 50_000  # as PCIe at 8 GB/s saves the KV of an 8B model


@pytest.fixture
def pace() -> SavePace:
    from kvshare.vllm_connector.scheduler.save_pace import SavePace

    return SavePace()


def learn(pace: SavePace, num_tokens: int, *, name: str = "r", seconds: float | None = None) -> None:
    """A save of so many tokens was begun, and has ended."""
    from kvshare.vllm_connector.metadata import SaveRequest, WorkerReport

    pace.begin([SaveRequest(name, (1,), ((SegmentId(1), Span(0, num_tokens)),))])
    taken = num_tokens / TOKENS_PER_S if seconds is None else seconds
    pace.note(WorkerReport(stage_seconds={name: {SAVE: taken}}))


def test_nothing_is_long_before_a_save_was_measured(pace: SavePace) -> None:
    """Nothing is known of the link."""
    assert not pace.is_long(10**6)


def test_a_save_is_long_by_the_pace_of_the_last_ones(pace: SavePace) -> None:
    """More than a tenth of a second."""
    learn(pace, 4096)
    assert [pace.is_long(num_tokens) for num_tokens in (0, 4900, 5100)] == [False, False, True]
    for _ in range(20):  # the link is ten times as fast now
        learn(pace, 4096, seconds=4096 / TOKENS_PER_S / 10)
    assert [pace.is_long(num_tokens) for num_tokens in (45_000, 60_000)] == [False, True]


def test_small_saves_say_nothing(pace: SavePace) -> None:
    """Their launches take longer than their bytes."""
    learn(pace, 4096)
    learn(pace, 16, seconds=0.01)
    assert not pace.is_long(4900)


def test_two_saves_of_one_request_count_together(pace: SavePace) -> None:
    """The seconds of its prompt's save are not those of its answer's few tokens."""
    from kvshare.vllm_connector.metadata import SaveRequest, WorkerReport

    spans = [Span(0, 4096), Span(4096, 4300)]
    pace.begin([SaveRequest("r", (1,), ((SegmentId(n), span),)) for n, span in enumerate(spans)])
    pace.note(WorkerReport(stage_seconds={"r": {SAVE: 4096 / TOKENS_PER_S}}))
    pace.note(WorkerReport(stage_seconds={"r": {SAVE: 204 / TOKENS_PER_S}}))
    assert not pace.is_long(4900)


def test_a_save_that_failed_is_forgotten(pace: SavePace) -> None:
    """Its tokens are not added to those of a later one of the same name; neither are loads."""
    from kvshare.vllm_connector.metadata import SaveRequest, WorkerReport

    pace.begin([SaveRequest("r", (1,), ((SegmentId(1), Span(0, 10**6)),)), SaveRequest("s", (1,))])
    pace.note(WorkerReport(failed_saves={"r"}, stage_seconds={"r": {"write": 1.0}}))
    learn(pace, 4096)
    assert [pace.is_long(num_tokens) for num_tokens in (4900, 5100)] == [False, True]
