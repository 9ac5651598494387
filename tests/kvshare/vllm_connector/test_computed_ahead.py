"""Real vLLM whose copies come from disk: what stands before them is computed while they are read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvshare.tiers.disk_tier import DiskTier
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.tiers.faulty_files import WaitingFiles
from tests.kvshare.vllm_connector.in_process_vllm import Vllm, copies_of, random_text

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.under_way import PendingLoad
    from kvshare.vllm_protocol.messages import FinishedReport
    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Start

LIMIT = 1e-4
NUM_TOKENS, FIRST = 600, 300
COPIED = ((FIRST, 480), (500, 590))
NUM_COPIED = 180 + 90


@dataclass(frozen=True)
class OnDisk:
    """A vLLM with a donor that only its disk has, which `files` reads when it may."""

    vllm: Vllm
    donor: FinishedReport
    files: WaitingFiles

    @property
    def tokens(self) -> list[int]:
        return random_text(NUM_TOKENS, 7)

    def ask(self, *, disk_s: float = 60.0) -> tuple[Answer, FinishedReport]:
        """A prompt of which all after `FIRST` is on disk, but for what lies between the copies."""
        vllm = self.vllm
        vllm.side.scheduler.drops.note(vllm.side.segments.evict(vllm.side.segments.ids()))
        vllm.forget_blocks()
        self.files.may_read.clear()
        ticket = vllm.ticket(self.tokens, copies_of(self.donor, *COPIED), disk_s=disk_s)
        (answer,) = vllm.ask((self.tokens, ticket, private_salt(ticket.ticket_id)))
        return answer, vllm.finished(ticket)

    def read_after_heads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Let the disk be read when nothing is left to compute before it. Returns the places reached."""
        heads, places = self.vllm.worker.parts.heads, list[int]()
        compute = heads.compute

        def noted(loads: Iterable[PendingLoad]) -> set[int]:
            waiting = list(loads)
            blocks = compute(waiting)
            places.extend(load.request.start for load in waiting if blocks)
            if waiting and not any(load.computes_head and load.request.head for load in waiting):
                self.files.may_read.set()
            return blocks

        monkeypatch.setattr(heads, "compute", noted)
        return places


@pytest.fixture(scope="module")
def on_disk(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnDisk]:
    from kvshare.vllm_connector.worker.disk_store import DiskStore

    vllm, files = start(disk=tmp_path_factory.mktemp("disk"), run=1), WaitingFiles()
    donor = vllm.store(random_text(NUM_TOKENS, 7))
    ids, deadline = [segment.segment_id for segment in donor.stored], time.monotonic() + 60
    while not all(segment_id in vllm.side.segments.disk for segment_id in ids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        vllm.plain([3, 4, 5])  # what was written is reported with a step
    store = vllm.worker.attached.store
    assert isinstance(store, DiskStore)
    assert isinstance(store.below, DiskTier)
    store.below._files = files
    yield OnDisk(vllm, donor, files)
    files.may_read.set()
    vllm.check_idle()


@pytest.mark.parametrize("step_tokens", [2048, 128])
def test_the_head_is_computed_meanwhile(
    on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    """In one pass or in several, and once: the answer is that of a full prefill."""
    expected = on_disk.vllm.plain(on_disk.tokens)
    monkeypatch.setattr(on_disk.vllm.worker.parts.heads, "_step_tokens", step_tokens)
    places = on_disk.read_after_heads(monkeypatch)
    answer, event = on_disk.ask()
    assert answer.distance(expected) <= LIMIT
    assert (event.decision, event.reason) == ("approx", None)
    assert event.num_computed == NUM_TOKENS - NUM_COPIED
    assert places == [min(FIRST, place) for place in range(step_tokens, FIRST + step_tokens, step_tokens)]
    assert 0 < event.stage_seconds["ahead"] <= event.stage_seconds["pass"]
    assert event.disk_bytes > 0


def test_what_a_pass_failed_to_compute_is_computed_later(
    on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the other placeholders, when the load has arrived."""
    expected, forward = on_disk.vllm.plain(on_disk.tokens), on_disk.vllm.worker.attached.forward
    on_disk.read_after_heads(monkeypatch)
    compute, failed = forward.compute, list[int]()

    def once(*given: Any, **named: Any) -> None:
        if not failed:
            failed.append(1)
            raise RuntimeError("on purpose")
        compute(*given, **named)

    monkeypatch.setattr(forward, "compute", once)
    answer, event = on_disk.ask()
    assert failed
    assert answer.distance(expected) <= LIMIT
    assert (event.decision, event.reason) == ("approx", None)
    assert "ahead" not in event.stage_seconds


def test_what_is_late_is_computed_after_the_head(on_disk: OnDisk) -> None:
    """The head is not computed again, and nothing is read for no one."""
    expected = on_disk.vllm.plain(on_disk.tokens)
    answer, event = on_disk.ask(disk_s=0.02)
    assert answer.distance(expected) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "kv_late", ())
    assert event.disk_bytes > 0
    on_disk.files.may_read.set()
