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
    from kvshare.vllm_connector.worker.partial_forward import Run
    from kvshare.vllm_connector.worker.segment_store import Stored
    from kvshare.vllm_connector.worker.start import Attached
    from kvshare.vllm_connector.worker.transfers import Transfers
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

BLOCKS, BLOCK_SIZE, HEADS, DIM, LAYERS = 24, 8, 2, 4, 3
NUM_TOKENS = 20  # of each request: three blocks, the last not full
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

    def wait(self, job: Job, timeout_s: float | None = None) -> None:
        while timeout_s is None and not job.is_done:
            self.run()

    def wait_until_read(self, job: Job) -> None:
        self.hurry(job)
        self.wait(job)

    def fail(self) -> None:
        """The next one copies all, then raises an error."""
        job = min(self.jobs, key=lambda job: job.due_s)
        batches = job.work.batches

        def failing() -> Iterator[None]:
            yield from batches()
            raise RuntimeError("out of memory")

        job.work.batches = failing  # type: ignore[method-assign]  # of this job only
        under_way = self._transfers._under_way.values()
        self.failed += [each.transfer.request.request_id for each in under_way if each.job is job]
        self.run()


def is_whole(stored: Stored) -> bool:
    """Whether a segment's bytes have the sums that were made when it was saved."""
    import torch

    from kvshare.kv.sums import sums

    assert stored.sums is not None
    found = sums(stored.rows.flatten(2), row_bytes=stored.row_bytes)
    return torch.equal(found, torch.from_numpy(stored.sums))


class FakeForward:
    """Computes a row that says at which position it stands."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.listening = None

    def compute(self, runs: Sequence[Run], *, watching: object = None) -> None:
        import torch

        for run in runs:
            slots = self.cache.slots(run.block_ids, run.span)
            rows = torch.arange(run.span.start, run.span.end).float() + 0.5
            rows = rows[None, :, None, None].expand(LAYERS, -1, HEADS, DIM)
            self.cache.write(rows, -rows, slots)


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


def new_worker(max_segments: int, *, num_layers: int = LAYERS, device: str = "cpu") -> ConnectorWorker:
    import torch

    from kvshare.kv.movement import STAYS
    from kvshare.vllm_connector.config import ConnectorSettings
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.segment_store import SegmentStore, arena_bytes
    from kvshare.vllm_connector.worker.start import Attached
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

    def update(_: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat([k, v], dim=-1)

    layers = {
        str(number): SimpleNamespace(
            kv_cache=torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM, device=device),
            impl=SimpleNamespace(do_kv_cache_update=update),
        )
        for number in range(num_layers)
    }
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=NUM_TOKENS))
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    worker = ConnectorWorker(config, ConnectorSettings(), spec, list(layers))
    cache = PagedCache(layers, block_size=BLOCK_SIZE)
    assert cache.find_layout(0) is None
    cache.kv_layout = cache.kv_layout.moving([(STAYS, STAYS)] * num_layers)
    buffer = torch.empty(arena_bytes(max_segments * NUM_TOKENS * BYTES_PER_TOKEN), dtype=torch.uint8)
    store = SegmentStore(buffer, cache.kv_layout, num_heads=HEADS)
    use(worker, Attached(cache, FakeForward(cache), store))  # type: ignore[arg-type]  # computes no model
    return worker


def use(worker: ConnectorWorker, attached: Attached, *, can_listen: bool = False) -> None:
    """The worker is attached to these parts; its thread copies when the test says."""
    worker.use(attached, can_listen=can_listen)
    transfers = worker.parts.transfers
    transfers._copies = LateCopies(transfers)  # type: ignore[assignment]  # has no thread


def late_copies(worker: ConnectorWorker) -> LateCopies:
    copies = worker.parts.transfers._copies
    assert isinstance(copies, LateCopies)
    return copies
