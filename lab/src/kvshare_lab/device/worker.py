"""
The connector's own worker on a simulated GPU: its transfers, batches, gathers and passes, as they are.

The arena is address space without memory: touching it ends the process, so no byte of it is read unseen.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from delta_tree import SegmentId
from kvshare.kv.movement import STAYS, Movement
from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.metadata import WorkerHandshake
from kvshare.vllm_connector.worker import copying, device, segment_store
from kvshare.vllm_connector.worker.block_layout import find_layout
from kvshare.vllm_connector.worker.copying import Job
from kvshare.vllm_connector.worker.device import CudaDevice
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward, Run
from kvshare.vllm_connector.worker.placeholders import ArrivedLoad, Placeholders
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored, arena_bytes
from kvshare.vllm_connector.worker.start import Attached, WorkerStart
from kvshare.vllm_connector.worker.transfers import PendingLoad, Transfers
from kvshare.vllm_connector.worker.worker import ConnectorWorker, WorkerParts
from kvshare_lab.device.clock import Event, Queue
from kvshare_lab.device.gpu import THERE, SimulatedGpu
from kvshare_lab.device.profile import Model

_COPIES = "copies"
_NO_RESERVE = 0x4000  # Linux: address space only; `mmap` has no name for it


class SimulatedDevice(CudaDevice):
    """Its batches and copies are those of CUDA; marks are times."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self._device = THERE
        self._staging = torch.empty(device.STAGING_BYTES, dtype=torch.uint8, device=THERE)

    def register(self, buffer: torch.Tensor) -> None:
        """Nothing to register."""

    def mark(self) -> float:
        return self.gpu.reached_at()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin if end <= self.gpu.clock.now() else None

    def run_after(self, mark: float, work: Any) -> float:
        with self.gpu.on_stream(_COPIES):
            self.gpu.hold(mark)
            began = self.mark()
            work()
            ended = self.mark()
            self.gpu.wait_until(ended)
        return ended - began


class SimulatedCopyThread:
    """Runs jobs in order, as an actor."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._jobs: Queue[Job] = Queue(gpu.clock)
        gpu.clock.start("copies", self._run)

    def submit(self, job: Job) -> Job:
        job._done = Event(self._gpu.clock)  # type: ignore[assignment]  # waits in virtual time
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """It ends with the simulation."""

    def _run(self) -> None:
        with self._gpu:
            while True:
                self._jobs.get().run()


class SimulatedTransfers(Transfers):
    """Charges what is done for a request to it."""

    def __init__(self, attached: Attached, device: SimulatedDevice, reports: Reports) -> None:
        super().__init__(attached, device, reports)
        self._gpu = device.gpu
        self._copies = SimulatedCopyThread(device.gpu)  # type: ignore[assignment]  # an actor

    def _write_copies(
        self, load: PendingLoad, held: Mapping[SegmentId, Stored], mark: object
    ) -> Mapping[str, float]:
        with self._gpu.on_behalf_of(load.request.request_id):
            return super()._write_copies(load, held, mark)

    def _copy_out(self, save: Any, mark: object) -> Mapping[str, float]:
        with self._gpu.on_behalf_of(save.request.request_id):
            return super()._copy_out(save, mark)


class SimulatedPlaceholders(Placeholders):
    """The same for its passes, to the first request of each."""

    def __init__(self, attached: Attached, device: SimulatedDevice, reports: Reports, **own: Any) -> None:
        super().__init__(attached, device, reports, **own)
        self._gpu = device.gpu

    def _compute_and_report(self, due: Sequence[ArrivedLoad]) -> None:
        with self._gpu.on_behalf_of(due[0].request_id):
            super()._compute_and_report(due)


class SimulatedForward(PartialForward):
    """A pass takes what the profile says; its inputs are made and sent as they are."""

    def __init__(self, gpu: SimulatedGpu, cache: PagedCache, *, max_tokens: int, max_runs: int) -> None:
        self._gpu, self._cache = gpu, cache
        self._max_tokens, self._max_runs = max_tokens, max_runs
        self.backend_name = "SIMULATED"

    def _forward(self, runs: Sequence[Run]) -> None:
        token_ids, _, _, _ = self._inputs(runs)
        self._gpu.charged.passes += 1
        self._gpu.launch(self._gpu.costs.placeholders_s(len(token_ids)))
        keys, _ = self._cache.kv_layout.planes
        shape = (len(token_ids), 4 * keys.num_heads, keys.dim)
        query = torch.empty(shape, dtype=self._cache.kv_layout.dtype, device=THERE)
        for layer in self._cache.layers.values():
            layer.impl.forward(layer, query, output=query)


class _Kernels:
    """Attention is part of what a pass takes. What listens to it is not, and wraps `forward`."""

    scale = 1.0

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def forward(self, _: object, query: torch.Tensor, *, output: torch.Tensor) -> None:
        """Nothing more."""

    def do_kv_cache_update(
        self, _: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._gpu.move(2 * (k.nbytes + v.nbytes))


@contextmanager
def charged_checksums(gpu: SimulatedGpu) -> Iterator[None]:
    """The host's passes over KV, and its clock, are the simulated ones."""

    def check(data: memoryview) -> int:
        gpu.check(data.nbytes)
        return 0

    with (
        patch.object(segment_store, "xxhash", SimpleNamespace(xxh3_64_intdigest=check)),
        patch.object(copying, "time", SimpleNamespace(perf_counter=gpu.clock.now)),
    ):
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
    ) -> None:
        on_gpu = SimulatedDevice(gpu)
        self._start = WorkerStart(config, settings, spec, tuple(layer_names), on_gpu)
        self._reports = Reports(on_gpu)
        cache = _cache(gpu, model, layer_names)
        limits = config.scheduler_config
        forward = SimulatedForward(
            gpu, cache, max_tokens=limits.max_num_batched_tokens, max_runs=limits.max_num_seqs
        )
        arena = _untouchable(arena_bytes(settings.max_bytes))
        self._attached = Attached(
            cache, forward, SegmentStore(arena, cache.kv_layout, num_heads=model.num_heads)
        )
        step_tokens = self._start.step_tokens
        self._parts = WorkerParts(
            SimulatedTransfers(self._attached, on_gpu, self._reports),
            SimulatedPlaceholders(
                self._attached, on_gpu, self._reports, step_tokens=step_tokens, can_listen=True
            ),
        )
        self.handshake = WorkerHandshake(
            unsupported=(),
            can_move_keys=True,
            can_listen=True,
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


def _untouchable(num_bytes: int) -> torch.Tensor:
    """Address space without memory, which can neither be read nor written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    found = torch.frombuffer(mmap.mmap(-1, num_bytes, flags), dtype=torch.uint8)
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(found.data_ptr()), num_bytes, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return found


def _cache(gpu: SimulatedGpu, model: Model, layer_names: Sequence[str]) -> PagedCache:
    """With the layout of FlashAttention, and keys that rotate as a Llama's do."""
    shape = (model.cache_tokens // model.block_size, model.num_heads, model.block_size, 2 * model.head_dim)
    layers = {
        name: SimpleNamespace(
            kv_cache=torch.empty(shape, dtype=torch.bfloat16, device=THERE), impl=_Kernels(gpu)
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
