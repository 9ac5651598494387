"""Which copies stand in a request's slots, through admissions, preemption and failed loads. No model."""

from typing import Any

import pytest

from delta_tree import SegmentId


@pytest.fixture
def running() -> Any:
    """A request whose first admission has laid copies at [0, 100) and [120, 300)."""
    from kvshare.engines.vllm.wire import Ticket, WireCopy
    from kvshare.vllm_connector.scheduler.request_state import Running

    copies = (WireCopy(SegmentId(1), 0, 100, 0, 0), WireCopy(SegmentId(2), 0, 180, 120, 50))
    running = Running(Ticket("t", "ns", "digest", 400, copies=copies), refusal=None, is_first=True)
    admit(running, num_local=0)
    return running


def admit(running: Any, *, num_local: int, held: tuple[int, ...] = (0, 1)) -> None:
    from kvshare.vllm_connector.metadata import LoadResult

    running.num_local = num_local
    running.note_admission(held, 300 - num_local)
    running.note_load(LoadResult())


def test_a_resumed_request_has_its_copies_again(running: Any) -> None:
    admit(running, num_local=128)
    assert running.used == {0, 1}
    assert not running.spoilt


def test_a_copy_that_is_gone_when_half_of_it_is_there_spoils(running: Any) -> None:
    """Its first slots are the segment's, the others were computed."""
    admit(running, num_local=128, held=(0,))
    assert running.spoilt


@pytest.mark.parametrize("failed", [True, False])
def test_a_copy_that_cannot_be_read_when_half_of_it_is_there_spoils(running: Any, failed: bool) -> None:
    """The same, found out by the worker."""
    from kvshare.vllm_connector.metadata import LoadResult

    running.num_local = 128
    running.note_admission((0, 1), 172)
    running.note_load(LoadResult(failed, frozenset([SegmentId(2)])))
    assert running.used == {0}
    assert running.spoilt


@pytest.mark.parametrize("failed", [True, False])
def test_a_copy_that_cannot_be_read_at_all_does_not(running: Any, failed: bool) -> None:
    """All of it was computed."""
    from kvshare.vllm_connector.metadata import LoadResult

    running.num_local = 110
    running.note_admission((0, 1), 190)
    running.note_load(LoadResult(failed, frozenset([SegmentId(2)])))
    assert running.used == {0}
    assert not running.spoilt


def test_a_late_report_of_an_earlier_admission_says_nothing(running: Any) -> None:
    """With a step in flight a request may be admitted again before its first load is heard of."""
    from kvshare.vllm_connector.metadata import LoadResult

    for _ in range(2):
        running.num_local = 0
        running.note_admission((0, 1), 300)
    running.note_load(LoadResult(failed=True))
    assert running.used == {0, 1}
    running.note_load(LoadResult())
    assert running.used == {0, 1}
    assert running.num_awaited == 0
