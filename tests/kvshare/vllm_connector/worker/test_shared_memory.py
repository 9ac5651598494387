"""Two ranks that share the memory of segments. Two real workers over small caches, each in a thread."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import (
    BYTES_PER_TOKEN,
    DIM,
    HEADS,
    LAYERS,
    NUM_TOKENS,
    is_whole,
    late_copies,
    new_worker,
    one_rank,
    use,
)

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.worker import ConnectorWorker

FIRST, SECOND = SegmentId(1), SegmentId(2)


class AgreementOfThreads:
    """As that of processes."""

    def __init__(self, ranks: TwoRanks) -> None:
        self._ranks = ranks
        self._said: Mapping[Hashable, bool] = {}

    def say(self, values: Mapping[Hashable, bool]) -> None:
        self._said = values

    def known(self) -> list[Hashable]:
        return self._ranks.both(self._said)


class TwoRanks:
    """Both run each step at the same time; they agree as ranks of tensor parallelism do."""

    def __init__(self, workers: Sequence[ConnectorWorker]) -> None:
        self.workers = workers
        self._barrier = threading.Barrier(len(workers), timeout=60)
        self._given: dict[int, Mapping[Hashable, bool]] = {}
        for worker in workers:
            worker.parts.transfers._agreement = AgreementOfThreads(self)  # type: ignore[assignment]  # of threads

    def both(self, mine: Mapping[Hashable, bool]) -> list[Hashable]:
        """What is true on both."""
        self._given[threading.get_ident()] = mine
        self._barrier.wait()
        one, other = self._given.values()
        assert list(one) == list(other)
        found = [key for key, value in one.items() if value and other[key]]
        self._barrier.wait()
        return found

    def step(self, **requested: Any) -> None:
        from kvshare.vllm_connector.metadata import StepMetadata

        self._given.clear()
        made = StepMetadata(**requested)

        def run(worker: ConnectorWorker) -> None:
            worker.begin(made)
            worker.advance(made)
            worker.save(made)

        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(run, self.workers))


def copy(worker: ConnectorWorker) -> None:
    copies = late_copies(worker)
    while copies.jobs:
        copies.run()


def worker_of_rank(number: int, buffer: torch.Tensor) -> ConnectorWorker:
    """Its blocks (1, 2, 3) hold one prompt, and (7, 8, 9) another."""
    import torch

    from kvshare.vllm_connector.worker.segment_store import SegmentStore
    from kvshare.vllm_connector.worker.start import Attached

    worker = new_worker(1)
    cache, forward = worker.attached.cache, worker.attached.forward
    store = SegmentStore(buffer, cache.kv_layout, num_heads=2 * HEADS, first_head=number * HEADS)
    use(worker, Attached(cache, forward, store))
    for blocks, value in (((1, 2, 3), 1.0), ((7, 8, 9), 2.0)):
        rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), value + 0.1 * number)
        cache.write(rows, -rows, cache.slots(blocks, Span(0, NUM_TOKENS)))
    return worker


@pytest.fixture
def ranks() -> Iterator[TwoRanks]:
    import torch

    from kvshare.vllm_connector.worker.segment_store import arena_bytes

    buffer = torch.empty(arena_bytes(2 * 2 * NUM_TOKENS * BYTES_PER_TOKEN), dtype=torch.uint8)
    with one_rank():
        yield TwoRanks([worker_of_rank(number, buffer) for number in range(2)])


def test_memory_that_ranks_share_is_free_when_both_have_copied(ranks: TwoRanks) -> None:
    """
    A segment is dropped while a load of it waits on both ranks. One rank copies ahead: it must not save the
    next prompt where the other rank has yet to read.
    """
    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest

    ranks.step(saves=(SaveRequest("s", (1, 2, 3), ((FIRST, Span(0, NUM_TOKENS)),), True),))
    for worker in ranks.workers:
        copy(worker)
    ranks.step()
    ranks.step()
    tokens, copies = tuple(range(NUM_TOKENS)), (WireCopy(FIRST, 0, NUM_TOKENS, 0, 0),)
    ranks.step(loads=(LoadRequest("l", (4, 5, 6), 0, NUM_TOKENS, tokens, copies),))
    ranks.step(drops=(FIRST,), saves=(SaveRequest("t", (7, 8, 9), ((SECOND, Span(0, 12)),), True),))
    for worker in reversed(ranks.workers):
        copy(worker)
    ranks.step()
    ranks.step()
    for number, worker in enumerate(ranks.workers):
        check_loaded_and_saved(worker, 1 + 0.1 * number)
    check_freed(ranks)


def check_loaded_and_saved(worker: ConnectorWorker, loaded: float) -> None:
    import torch

    report, transfers = worker.build_connector_worker_meta(), worker.take_transfers()
    assert report is not None
    assert transfers.finished_sending == {"s", "t"}
    assert not report.failed_saves
    assert not report.loads["l"].failed
    assert not report.unreadable
    rows = worker.attached.cache.read((4, 5, 6), Span(0, NUM_TOKENS))
    assert (rows.k == torch.tensor(loaded)).all()
    assert is_whole(worker.attached.store.find([SECOND])[SECOND])


def check_freed(ranks: TwoRanks) -> None:
    """The dropped segment's memory is free again, and both ranks say the same."""
    from kvshare.vllm_connector.worker.segment_store import arena_bytes

    first, second = (worker.attached.store.arena for worker in ranks.workers)
    assert first._by_start == second._by_start
    num_free = sum(end - start for start, end in first._by_start.items())
    assert num_free > arena_bytes(2 * NUM_TOKENS * BYTES_PER_TOKEN)


def test_a_segment_that_one_rank_finds_damaged_is_unreadable_on_both(ranks: TwoRanks) -> None:
    """They know it a step after it was found, and compute its tokens instead."""
    import torch

    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest

    ranks.step(saves=(SaveRequest("s", (1, 2, 3), ((FIRST, Span(0, NUM_TOKENS)),), True),))
    for worker in ranks.workers:
        copy(worker)
    for _ in range(2):
        ranks.step()
    ranks.workers[1].attached.store.find([FIRST])[FIRST].rows.view(torch.uint8)[1, 2, 0, 7, 3] ^= 4
    tokens, copies = tuple(range(NUM_TOKENS)), (WireCopy(FIRST, 0, NUM_TOKENS, 0, 0),)
    ranks.step(loads=(LoadRequest("l", (4, 5, 6), 0, NUM_TOKENS, tokens, copies),))
    for worker in ranks.workers:
        copy(worker)
    for _ in range(2):
        ranks.step()
    for worker in ranks.workers:
        report = worker.build_connector_worker_meta()
        assert report is not None
        assert (report.loads["l"].failed, report.unreadable) == (False, frozenset({FIRST}))
        rows = worker.attached.cache.read((4, 5, 6), Span(0, NUM_TOKENS))
        assert torch.equal(rows.k[0, :, 0, 0], torch.arange(NUM_TOKENS) + 0.5)
