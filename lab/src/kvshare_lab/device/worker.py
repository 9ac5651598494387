"""
The connector's own worker on a simulated GPU: its transfers, batches, gathers and passes, as they are.

The arena is address space without memory: touching it ends the process, so no byte of it is read unseen.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from delta_tree import Span
from kvshare.kv.movement import STAYS, Movement
from kvshare.sharing import repair_choice
from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, WorkerHandshake
from kvshare.vllm_connector.scheduler import joining, prefill_times
from kvshare.vllm_connector.worker import choosing, copying, device, disk_reads, head_passes
from kvshare.vllm_connector.worker.block_copies import FindBlockCopies
from kvshare.vllm_connector.worker.block_layout import find_layout
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.copying import LoadWork, Work
from kvshare.vllm_connector.worker.device import GpuDevice
from kvshare.vllm_connector.worker.early_passes import EarlyPasses
from kvshare.vllm_connector.worker.head_passes import HeadPasses
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.placeholders import ArrivedLoad, Placeholders
from kvshare.vllm_connector.worker.ranks import num_ranks
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored, arena_bytes
from kvshare.vllm_connector.worker.start import Attached
from kvshare.vllm_connector.worker.transfers import Transfers
from kvshare.vllm_connector.worker.under_way import PendingLoad
from kvshare.vllm_connector.worker.worker import ConnectorWorker, WorkerParts
from kvshare_lab.device.disk import SimulatedDisk, SimulatedDiskStore
from kvshare_lab.device.forward import Kernels, SimulatedForward
from kvshare_lab.device.gpu import THERE, SimulatedGpu
from kvshare_lab.device.profile import Model
from kvshare_lab.device.streams import SimulatedStreams
from kvshare_lab.device.threads import in_virtual_time

_WorkT = TypeVar("_WorkT", bound=Work)
_NO_RESERVE = 0x4000  # Linux: address space only; `mmap` has no name for it
# The thread that copies is an actor, and what waits in vLLM's own waits in virtual time.
_VIRTUAL = {
    copying: ("threading", "time"),
    **dict.fromkeys((device, disk_reads, head_passes, joining, prefill_times), ("time",)),
}


class SimulatedDevice(GpuDevice):
    """Its lanes, batches and order of copies are those of a GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.streams = gpu, SimulatedStreams(gpu)
        super().__init__(self.streams)

    def load(self, cache: PagedCache, find_copies: Callable[[], Sequence[RowCopy]], *, mark: Any) -> LoadWork:
        return self._charged(super().load(cache, find_copies, mark=mark))

    def copy_blocks(self, cache: PagedCache, find_copies: FindBlockCopies, *, mark: Any) -> Work:
        return self._charged(super().copy_blocks(cache, find_copies, mark=mark))

    def save(
        self,
        cache: PagedCache,
        block_ids: Sequence[int],
        targets: Sequence[tuple[Stored, Span]],
        *,
        mark: Any,
    ) -> Work:
        return self._charged(super().save(cache, block_ids, targets, mark=mark))

    def _charged(self, work: _WorkT) -> _WorkT:
        """Its batches are charged to the request that it is made for."""
        request_id, batches = self.gpu.request, work.batches

        def charged() -> Iterator[None]:
            left = batches()
            while True:
                with self.gpu.on_behalf_of(request_id):
                    if next(left, self) is self:
                        return
                yield

        work.batches = charged  # type: ignore[method-assign]  # of this one
        return work


class SimulatedTransfers(Transfers):
    """Charges what is begun for a request to it."""

    def __init__(self, attached: Attached, on_gpu: SimulatedDevice, reports: Reports) -> None:
        super().__init__(attached, on_gpu, reports)
        self._gpu = on_gpu.gpu

    def begin_load(self, request: LoadRequest, *, joins: bool) -> None:
        with self._gpu.on_behalf_of(request.request_id):
            super().begin_load(request, joins=joins)

    def begin_save(self, request: SaveRequest) -> None:
        with self._gpu.on_behalf_of(request.request_id):
            super().begin_save(request)


class SimulatedPlaceholders(Placeholders):
    """The same for its passes, to the first request of each."""

    def __init__(self, attached: Attached, device: SimulatedDevice, reports: Reports, **own: Any) -> None:
        super().__init__(attached, device, reports, **own)
        self._gpu = device.gpu

    def _compute_and_report(self, due: Sequence[ArrivedLoad], joining: Sequence[ArrivedLoad]) -> None:
        with self._gpu.on_behalf_of([*joining, *due][0].request_id):
            super()._compute_and_report(due, joining)


class SimulatedEarlyPasses(EarlyPasses):
    """The same."""

    def __init__(self, attached: Attached, device: SimulatedDevice, reports: Reports, **own: Any) -> None:
        super().__init__(attached, device, reports, **own)
        self._gpu = device.gpu

    def begin(self, load: PendingLoad) -> None:
        with self._gpu.on_behalf_of(load.request.request_id):
            super().begin(load)


class SimulatedHeadPasses(HeadPasses):
    """The same."""

    def __init__(self, attached: Attached, device: SimulatedDevice, reports: Reports, **own: Any) -> None:
        super().__init__(attached.forward, device, reports, **own)
        self._gpu = device.gpu

    def compute(self, loads: Iterable[PendingLoad]) -> set[int]:
        waiting = list(loads)
        with self._gpu.on_behalf_of(waiting[0].request.request_id if waiting else ""):
            return super().compute(waiting)


@contextmanager
def virtual_threads(gpu: SimulatedGpu) -> Iterator[None]:
    """In which the worker must run. Choosing repairs takes the host what the profile says."""

    def choose(*given: Any, **options: Any) -> Any:
        scores: NDArray[Any] = given[2]
        gpu.clock.spend(scores.size * gpu.costs.choose_s)
        return repair_choice.choose(*given, **options)

    with in_virtual_time(gpu, _VIRTUAL), patch.object(choosing, "choose", choose):
        yield


class SimulatedWorker(ConnectorWorker):
    """`config` and `spec` are the scheduler's."""

    def __init__(
        self,
        gpu: SimulatedGpu,
        model: Model,
        config: VllmConfig,
        settings: ConnectorSettings,
        spec: KVCacheSpec,
        layer_names: Sequence[str],
        *,
        can_listen: bool = True,
        disk: SimulatedDisk | None = None,
    ) -> None:
        on_gpu = SimulatedDevice(gpu)
        super().__init__(config, settings, spec, layer_names, on_gpu)
        self.streams = on_gpu.streams
        cache = _cache(gpu, model, layer_names)
        limits = config.scheduler_config
        forward = SimulatedForward(
            gpu, cache, max_tokens=limits.max_num_batched_tokens, max_runs=limits.max_num_seqs
        )
        arena = _untouchable(arena_bytes(settings.max_bytes // num_ranks()))
        self._attached = Attached(cache, forward, _store(arena, cache, model, disk))
        step_tokens = self._start.step_tokens
        self._parts = WorkerParts(
            SimulatedTransfers(self._attached, on_gpu, self._reports),
            SimulatedPlaceholders(
                self._attached, on_gpu, self._reports, step_tokens=step_tokens, can_listen=can_listen
            ),
            SimulatedEarlyPasses(
                self._attached, on_gpu, self._reports, step_tokens=step_tokens, can_listen=can_listen
            ),
            SimulatedHeadPasses(self._attached, on_gpu, self._reports, step_tokens=step_tokens),
        )
        self.handshake = WorkerHandshake(
            unsupported=(),
            can_move_keys=True,
            can_listen=can_listen,
            can_copy_blocks=True,
            rope=cache.kv_layout.digest,
            num_layers=model.num_layers,
            num_kv_heads=model.num_heads,
            head_dim=model.head_dim,
            dtype="bfloat16",
            attention_backend="SIMULATED/content",
            bytes_per_token=model.bytes_per_token,
            weights="simulated",
            fingerprint="simulated",
        )


def _store(arena: torch.Tensor, cache: PagedCache, model: Model, disk: SimulatedDisk | None) -> SegmentStore:
    if disk is None:
        return SegmentStore(arena, cache.kv_layout, num_heads=model.num_heads)
    return SimulatedDiskStore(arena, cache.kv_layout, num_heads=model.num_heads, disk=disk)


def _untouchable(num_bytes: int) -> torch.Tensor:
    """Address space without memory, which can neither be read nor written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    found = torch.frombuffer(mmap.mmap(-1, num_bytes, flags), dtype=torch.uint8)
    start, size = ctypes.c_void_p(found.data_ptr()), ctypes.c_size_t(num_bytes)
    if ctypes.CDLL(None, use_errno=True).mprotect(start, size, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return found


def _cache(gpu: SimulatedGpu, model: Model, layer_names: Sequence[str]) -> PagedCache:
    """With the layout of FlashAttention, and keys that rotate as a Llama's do."""
    shape = (model.cache_tokens // model.block_size, model.num_heads, model.block_size, 2 * model.head_dim)
    layers = {
        name: SimpleNamespace(
            kv_cache=torch.empty(shape, dtype=torch.bfloat16, device=THERE), impl=Kernels(gpu)
        )
        for name in layer_names
    }
    cache = PagedCache(layers, block_size=model.block_size)
    block = torch.zeros(model.num_heads, model.block_size, 2 * model.head_dim)

    def write(k: torch.Tensor, v: torch.Tensor) -> None:
        block[:] = torch.cat([k, v], dim=-1).transpose(0, 1)

    cache._layout = find_layout(block, write)
    turns = Movement(tuple(1e6 ** (-2 * n / model.head_dim) for n in range(model.head_dim // 2)))
    cache.kv_layout = cache.kv_layout.moving([(turns, STAYS)] * model.num_layers)
    return cache
