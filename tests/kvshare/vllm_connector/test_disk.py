"""Real vLLM with files below its host memory: what is found after a restart, and how it is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvshare.tiers.disk_tier import DiskTier
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.tiers.faulty_files import WaitingFiles
from tests.kvshare.tiers.small_store import SmallStore, wrong_nodes
from tests.kvshare.vllm_connector.in_process_vllm import NAMESPACE, Vllm, copies_of, random_text

if TYPE_CHECKING:
    from pathlib import Path

    from kvshare.vllm_protocol.messages import FinishedReport
    from tests.kvshare.vllm_connector.in_process_vllm import Start

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
NUM_TOKENS, NUM_DONORS = 600, 5
MEMORY_BYTES = 3 * NUM_TOKENS * 1536  # room for fewer prompts than the disk has


@dataclass(frozen=True)
class Restarted:
    """A vLLM that was started again, and what an earlier one reported of the prompts that it stored."""

    vllm: Vllm
    donors: tuple[FinishedReport, ...]
    folder: Path

    def tokens(self, number: int) -> list[int]:
        return random_text(NUM_TOKENS, 100 + number)

    def path(self, number: int, segment: int = 0) -> Path:
        from kvshare.vllm_connector.worker.disk_store import DiskStore

        store = self.vllm.worker.attached.store
        assert isinstance(store, DiskStore)
        assert isinstance(store.below, DiskTier)
        return store.below._path(self.donors[number].stored[segment].segment_id)


@pytest.fixture(scope="module")
def restarted(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    folder = tmp_path_factory.mktemp("disk")
    first = start(disk=folder, run=1)
    donors = tuple(first.store(random_text(NUM_TOKENS, 100 + number)) for number in range(NUM_DONORS))
    ids = [segment.segment_id for donor in donors for segment in donor.stored]
    deadline = time.monotonic() + 60
    while not all(segment_id in first.side.segments.disk for segment_id in ids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        first.plain([3, 4, 5])  # what was written is reported with a step
    first.check_idle()
    embedded = SmallStore(folder)  # whose folder is the same, by mistake or because there is one disk
    embedded.store(1)
    embedded.settle()
    embedded.close()
    second = start(disk=folder, run=2, max_bytes=MEMORY_BYTES)
    assert sorted(second.side.segments.ids()) == sorted(ids)
    assert second.side.segments.num_bytes == 0
    assert second.side.info().max_disk_bytes == 1 << 30
    yield Restarted(second, donors, folder)
    second.check_idle()


def test_a_near_duplicate_after_a_restart(restarted: Restarted) -> None:
    """Its copies are read from disk, its answer is that of a full prefill; then they are in memory."""
    vllm, tokens = restarted.vllm, restarted.tokens(0)
    plan = copies_of(restarted.donors[0], *SCATTERED)
    expected = vllm.plain(tokens)
    for is_on_disk in (True, False):
        answer, event = vllm.shared(tokens, plan)
        assert answer.distance(expected) <= LIMIT
        assert (event.decision, event.used) == ("approx", tuple(range(len(plan))))
        assert (event.disk_bytes > 0, "disk" in event.stage_seconds) == (is_on_disk, is_on_disk)
        vllm.forget_blocks()


def test_an_embedded_store_in_the_same_folder_keeps_its_own(restarted: Restarted) -> None:
    """Each deletes what belongs to none of its prompts, of its own files only."""
    vllm_files = set(restarted.folder.glob("vllm-kv/**/*.kv"))
    embedded = SmallStore(restarted.folder)
    try:
        embedded.settle()
        assert len(embedded.safe()) == 1
        assert wrong_nodes(embedded) == []
        assert vllm_files
        assert vllm_files <= set(restarted.folder.glob("vllm-kv/**/*.kv"))
    finally:
        embedded.close()


def test_an_exact_prefix_after_a_restart(restarted: Restarted) -> None:
    """vLLM's own cache is empty: the prefix comes from disk, for a request that is exact."""
    vllm, tokens = restarted.vllm, restarted.tokens(1)
    plan = copies_of(restarted.donors[1], (0, 590))
    ticket = vllm.ticket(tokens, plan, exact_length=590)
    (answer,) = vllm.ask((tokens, ticket, vllm.fresh("tenant")))
    event = vllm.finished(ticket)
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.num_computed) == ("exact", 10)
    assert event.disk_bytes


@pytest.mark.parametrize("spoil", ["damaged", "missing"])
def test_what_is_not_whole_on_disk_is_computed(restarted: Restarted, spoil: str) -> None:
    """Its other segment is read; the proxy is told that this one is gone."""
    vllm, number = restarted.vllm, 2 if spoil == "damaged" else 3
    path = restarted.path(number)
    if spoil == "damaged":
        raw = bytearray(path.read_bytes())
        raw[-1000] ^= 1
        path.write_bytes(raw)
    else:
        path.unlink()
    tokens = restarted.tokens(number)
    answer, event = vllm.shared(tokens, copies_of(restarted.donors[number], *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    gone = restarted.donors[number].stored[0].segment_id
    assert (event.reason, gone in vllm.dropped()) == ("segments_gone", True)
    assert event.used
    assert gone not in vllm.side.segments


def test_another_namespace_gets_nothing_from_disk(restarted: Restarted) -> None:
    """The file says whose it is."""
    vllm, tokens = restarted.vllm, restarted.tokens(4)
    plan = copies_of(restarted.donors[4], (0, 590))
    ticket = vllm.ticket(tokens, plan, exact_length=590, namespace=f"not-{NAMESPACE}")
    vllm.ask((tokens, ticket, vllm.fresh("tenant")))
    event = vllm.finished(ticket)
    assert (event.decision, event.disk_bytes) == ("full", 0)


def test_more_than_memory_holds_comes_and_goes(restarted: Restarted) -> None:
    """Every answer is right, memory keeps its limit, and what left it is still on disk."""
    vllm, segments = restarted.vllm, restarted.vllm.side.segments
    for number in (0, 1, 4, 0, 1, 4):
        tokens = restarted.tokens(number)
        answer, event = vllm.shared(tokens, copies_of(restarted.donors[number], *SCATTERED))
        assert answer.distance(vllm.plain(tokens)) <= LIMIT
        assert event.decision == "approx"
        assert segments.num_bytes <= MEMORY_BYTES
        vllm.forget_blocks()
    kept = {segment.segment_id for number in (0, 1, 4) for segment in restarted.donors[number].stored}
    assert not kept & vllm.dropped()
    assert segments.only_on_disk(kept)


def test_a_disk_that_is_late_is_not_waited_for(restarted: Restarted) -> None:
    """Its tokens are computed, nothing is dropped, and the next prompt has them from disk."""
    from kvshare.vllm_connector.worker.disk_store import DiskStore

    vllm, tokens, files = restarted.vllm, restarted.tokens(0), WaitingFiles()
    segments, store = vllm.side.segments, vllm.worker.attached.store
    assert isinstance(store, DiskStore)
    vllm.side.scheduler.drops.note(segments.evict(segments.ids()))
    assert isinstance(store.below, DiskTier)
    store.below._files = files
    files.may_read.clear()
    plan = copies_of(restarted.donors[0], *SCATTERED)
    ticket = vllm.ticket(tokens, plan, disk_s=0.02)
    (answer,) = vllm.ask((tokens, ticket, private_salt(ticket.ticket_id)))
    event = vllm.finished(ticket)
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "kv_late", ())
    files.may_read.set()
    answer, event = vllm.shared(tokens, plan)
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, len(event.used)) == ("approx", len(plan))
    assert not {copy.segment_id for copy in plan} & vllm.dropped()


def test_a_dropped_segment_leaves_the_disk(restarted: Restarted) -> None:
    """With the next step, which vLLM takes for it alone."""
    vllm, path = restarted.vllm, restarted.path(4)
    assert path.exists()
    vllm.drop(restarted.donors[4])
    deadline = time.monotonic() + 60
    vllm.settle()
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
