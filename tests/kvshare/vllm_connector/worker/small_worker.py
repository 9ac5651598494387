"""
The real worker over a small cache: its protocol, store, writing and gathering, without a model. The thread
that copies does so only when the test says; order is all that it promises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.copying import Job
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.runs import Run
    from kvshare.vllm_connector.worker.segment_store import Stored
    from kvshare.vllm_connector.worker.start import Attached
    from kvshare.vllm_connector.worker.transfers import Transfers
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

BLOCKS, BLOCK_SIZE, HEADS, DIM, LAYERS = 24, 8, 2, 4, 3
NUM_TOKENS = 20  # of each request: three blocks, the last not full
MIXED = ((2, 4), (1, 8), (2, 4))  # heads and dimensions of layers that differ, as many numbers in each
BYTES_PER_TOKEN = HEADS * LAYERS * 2 * DIM * 4


class LateCopies:
    """Jobs by when they are due, when `run` is called, or somebody waits for one."""

    def __init__(self, transfers: Transfers) -> None:
        from kvshare.vllm_connector.worker.copying import CopyQueue

        self.failed: list[str] = []  # what raised an error in the middle, as `fail` wanted
        self._queue = CopyQueue()
        self._transfers = transfers
        self.submit, self.hurry = self._queue.submit, self._queue.hurry

    @property
    def jobs(self) -> Sequence[Job]:
        return self._queue._jobs

    def run(self) -> None:
        """All batches of a job, and of those that overtake it."""
        job = self._queue.advance()
        while job is not None and not job.is_launched:
            job = self._queue.advance()

    def wait(self, job: Job, timeout_s: float | None = None) -> bool:
        while timeout_s is None and not job.is_done:
            self.run()
        return job.is_done

    def wait_for_all(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.hurry(job)
            self.wait(job)

    def wait_until_read(self, job: Job) -> None:
        self.hurry(job)
        while not job.is_launched:
            self.run()
        if not job.is_done:
            job.work.wait_until_read()

    def fail(self) -> None:
        """The next one copies all, then raises an error."""
        job = min(self.jobs, key=lambda job: job.due_s)
        batches = job.work.batches

        def failing() -> Iterator[None]:
            yield from batches()
            raise RuntimeError("out of memory")

        job.work.batches = failing  # type: ignore[method-assign]  # of this job only
        under_way = (*self._transfers._under_way.values(), *self._transfers._joining)
        self.failed += [each.transfer.request.request_id for each in under_way if each.job is job]
        self.run()


def is_whole(stored: Stored) -> bool:
    """Whether a segment's bytes have the sums that were made when it was saved."""
    import torch

    from kvshare.kv.sums import sums

    assert stored.is_saved
    return all(
        torch.equal(sums(part.rows.flatten(2), row_bytes=part.row_bytes), torch.from_numpy(part.sums))
        for part in stored.parts
    )


def write_rows(cache: PagedCache, values: torch.Tensor, slots: torch.Tensor) -> None:
    """A number for each token in all of its K, and below zero in its V. Shapes:  values, slots (T,)"""
    for number, layer in enumerate(cache.layers.values()):
        _, heads, _, width = layer.kv_cache.shape
        rows = values[:, None, None].expand(-1, heads, width // 2)
        cache.write_layer(number, rows, -rows, slots)


class FakeForward:
    """Computes a row that says at which position it stands."""

    may_stop = False

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.listening = None

    def compute(self, runs: Sequence[Run], *, watching: object = None) -> None:
        import torch

        for run in runs:
            slots = self.cache.slots(run.block_ids, run.span)
            write_rows(self.cache, torch.arange(run.span.start, run.span.end).float() + 0.5, slots)
        self._let_listen(runs)

    def _let_listen(self, runs: Sequence[Run]) -> None:
        from kvshare.kv.listening import placed

        places = list(zip(placed([run.span for run in runs]), runs, strict=True))
        for listener in {run.listener for run in runs if run.listener is not None}:
            if rows := listener.rows_of(place for place, run in places if run.listener is listener):
                for layer in filter(rows.listen_in, range(LAYERS)):
                    listener.note(layer, rows)


def late_device(*, arrives: Collection[int] = ()) -> Any:
    """A device whose results are on the host when the test says, or from a number of questions on."""
    from kvshare.vllm_connector.worker.device import Device, Reading

    class LateDevice(Device):
        reads_at_once = False
        has_arrived = False
        questions = 0

        def read(self, *results: torch.Tensor) -> Reading:
            return Reading(results, self._ask)

        def _ask(self) -> bool:
            self.questions += 1
            return self.has_arrived or self.questions in arrives

    return LateDevice()


@contextmanager
def one_rank() -> Iterator[None]:
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    with patch("kvshare.vllm_connector.worker.ranks.get_tp_group", lambda: group):
        yield


def new_worker(
    max_segments: int,
    *,
    shapes: Sequence[tuple[int, int]] = ((HEADS, DIM),) * LAYERS,
    device: str = "cpu",
) -> ConnectorWorker:
    """`shapes`: heads and dimension of each layer."""
    import torch

    from kvshare.kv.movement import STAYS
    from kvshare.vllm_connector.config import ConnectorSettings
    from kvshare.vllm_connector.worker.mixed_cache import paged_cache
    from kvshare.vllm_connector.worker.segment_store import SegmentStore, arena_bytes
    from kvshare.vllm_connector.worker.start import Attached
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

    def update(_: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat([k, v], dim=-1)

    layers = {
        str(number): SimpleNamespace(
            kv_cache=torch.zeros(BLOCKS, heads, BLOCK_SIZE, 2 * dim, device=device),
            impl=SimpleNamespace(do_kv_cache_update=update),
        )
        for number, (heads, dim) in enumerate(shapes)
    }
    scheduler = SimpleNamespace(max_num_batched_tokens=NUM_TOKENS)
    config = SimpleNamespace(scheduler_config=scheduler, speculative_config=None)
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    worker = ConnectorWorker(config, ConnectorSettings(), spec, list(layers))
    cache = paged_cache(layers, block_size=BLOCK_SIZE, dtype=torch.float32)
    assert cache.find_layout(0) is None
    cache.set_movements([(STAYS, STAYS)] * len(shapes))
    buffer = torch.empty(arena_bytes(max_segments * NUM_TOKENS * BYTES_PER_TOKEN), dtype=torch.uint8)
    store = SegmentStore(buffer, cache.kv_layout)
    use(worker, Attached(cache, FakeForward(cache), store))  # type: ignore[arg-type]  # computes no model
    return worker


def use(worker: ConnectorWorker, attached: Attached, *, can_listen: bool = False) -> None:
    """The worker is attached to these parts; its thread copies when the test says."""
    worker.use(attached, can_listen=can_listen)
    transfers = worker.parts.transfers
    transfers._copies = transfers._joining._copies = LateCopies(transfers)  # type: ignore[assignment]  # no thread


def late_copies(worker: ConnectorWorker) -> LateCopies:
    copies = worker.parts.transfers._copies
    assert isinstance(copies, LateCopies)
    return copies
