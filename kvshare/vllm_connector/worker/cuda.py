"""
A GPU of CUDA: streams and events of torch, and our Triton kernels.

If our kernels cannot address the layout of vLLM's blocks, torch and vLLM's own kernels do the same, in some
launches for each layer. If they cannot address host memory, the driver copies many rows in one call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.cpu.host_register import host_register

from delta_tree import Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.sums import sums
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.batched_copy import copy_all, find_batch_function
from kvshare.vllm_connector.worker.block_copies import cut
from kvshare.vllm_connector.worker.block_layout import ADDRESSABLE
from kvshare.vllm_connector.worker.block_rows import BlockCopy, copy_by_torch, slot_table
from kvshare.vllm_connector.worker.copy_writer import LayerRows, write_layers
from kvshare.vllm_connector.worker.gpu import Event, Stream
from kvshare.vllm_connector.worker.host_addresses import has_host_addresses
from kvshare.vllm_connector.worker.kernel_host_tables import tiles
from kvshare.vllm_connector.worker.kernel_tables import MovementTable
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.staged_layers import StagedLayers, saved
from kvshare.vllm_connector.worker.staged_load import StagedLoad

log = logging.getLogger("vllm.kvshare")

_TORCH_BATCH_BYTES = 256 * 1024**2  # rows of one copy without our kernel, which holds those of a layer


@dataclass(slots=True, eq=False)
class _Begun:
    """
    A load between its batches. `placing`: the tables of our kernels; None if torch writes the rows.

    Shapes:  expected, found (P,) int64 on the device, sums of all pieces
    """

    load: StagedLoad
    expected: torch.Tensor
    found: torch.Tensor
    placing: Any
    placed: Any = None  # the batch that was checked last


class CudaGpu:
    """Implements `Gpu`. Tests of its calls use a fake torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        own = set(Stream) - {Stream.VLLM}
        self._streams = {stream: torch.cuda.Stream(device) for stream in own}  # type: ignore[no-untyped-call]  # torch's own
        self._kernels, self._block_kernels = _kernels()
        self._copy_batch = find_batch_function()
        self._reads_host = False  # whether our kernels address the arena
        self._movements: dict[int, tuple[KVLayout, MovementTable]] = {}  # by `id()` of the caches' layouts

    def register(self, buffer: torch.Tensor) -> None:
        # vLLM's function logs an error and clears it. Otherwise the next launch of a kernel would raise it.
        if not host_register(buffer.data_ptr(), buffer.nbytes):
            self._copy_batch = None  # torch can copy any host memory
            log.warning(
                "kvshare: CUDA cannot register %d bytes of host memory: copies will be several times slower. "
                "A smaller --kv-bytes or a higher limit of locked memory (ulimit -l) may help",
                buffer.nbytes,
            )
            return
        self._reads_host = has_host_addresses(self._device.index or 0, buffer)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def simplify(self) -> bool:
        had_own = self._kernels is not None or self._copy_batch is not None
        self._kernels = self._block_kernels = self._copy_batch = None
        return had_own

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._stream(stream).wait_event(event)

    def is_past(self, event: Event) -> bool:
        return bool(event.query())

    def seconds(self, begin: Event, end: Event) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None

    def read(self, result: torch.Tensor) -> torch.Tensor:
        return self._to_host(result)

    def up(self, batch: Sequence[StagedLayers], staging: torch.Tensor) -> None:
        with self._in(Stream.UP):
            self._cross(batch, staging, up=True)

    def begin_load(self, cache: PagedCache, load: StagedLoad) -> _Begun:
        with self._in(Stream.WRITE):
            placing = None
            if self._kernels is not None and cache.layout == ADDRESSABLE:
                movements = self._movements_of(cache.kv_layout)
                placing = self._kernels.place(cache.caches, load.copies, movements, self._device)
            expected, found = to_device(self._device, load.sums(), np.zeros(load.num_pieces, np.int64))
            return _Begun(load, expected, found, placing)

    def check(self, cache: PagedCache, begun: _Begun, number: int, staging: torch.Tensor) -> None:
        load, batch = begun.load, begun.load.batches[number]
        with self._in(Stream.WRITE):
            sums = begun.found[load.pieces(number)]
            if begun.placing is None:
                sums.copy_(self._sums(staging, batch))
                return
            begun.placed = self._kernels.place_batch(
                cache.caches, staging, begun.placing, load.parts(number), [layers.part for layers in batch]
            )
            self._kernels.add_up(staging, begun.placed.summed, begun.placed.columns, sums)

    def scatter(self, cache: PagedCache, begun: _Begun, number: int, staging: torch.Tensor) -> None:
        with self._in(Stream.WRITE):
            if begun.placing is None:
                pairs = begun.load.pairs(number)
                write_layers(cache, [LayerRows(p.view(staging), p.layers, copy) for p, copy in pairs])
                return
            self._kernels.scatter_batch(cache.caches, staging, begun.placing, begun.placed)

    def compare(self, begun: _Begun) -> torch.Tensor:
        with self._in(Stream.WRITE):
            return self._to_host(begun.found != begun.expected)

    def copy_blocks(self, cache: PagedCache, copies: Sequence[BlockCopy]) -> None:
        with self._in(Stream.BLOCKS):
            if self._block_kernels is None or cache.layout != ADDRESSABLE:
                for batch in cut(cache, copies, _TORCH_BATCH_BYTES):
                    copy_by_torch(cache, batch)
                return
            table = slot_table(cache, copies)
            self._block_kernels.copy_rows(cache.caches, table, self._movements_of(cache.kv_layout))

    def gather(
        self,
        cache: PagedCache,
        staging: torch.Tensor,
        block_ids: Sequence[int],
        batch: Sequence[tuple[StagedLayers, Span]],
    ) -> None:
        with self._in(Stream.GATHER):
            if self._kernels is None or cache.layout != ADDRESSABLE:
                rows = [(part.layers, part.view(staging)) for part, _ in batch]
                cache.gather_layers(block_ids, [span for _, span in batch], rows)
                return
            self._kernels.gather(cache.caches, staging, saved(batch, cache, block_ids))

    def sums(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> torch.Tensor:
        with self._in(Stream.GATHER):
            return self._to_host(self._sums(staging, batch))

    def down(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> None:
        with self._in(Stream.DOWN):
            self._cross(batch, staging, up=False)

    def _cross(self, batch: Sequence[StagedLayers], staging: torch.Tensor, *, up: bool) -> None:
        """Copy a batch between host memory and staging: by our kernel if it can, else by the driver."""
        if self._reads_host and self._kernels is not None and (table := tiles(batch)) is not None:
            self._kernels.copy_host(staging, table, up=up)
            return
        there, here = _places(batch, staging)
        if up:
            self._copy(there, here, is_stable=True)
        else:
            self._copy(here, there, is_stable=False)

    def _copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, is_stable: bool
    ) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        copy_all(self._copy_batch, targets, sources, stream=stream, is_stable=is_stable)

    def _sums(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> torch.Tensor:
        """Return the sums of all pieces on the device, (P,), in the order of parts."""
        if self._kernels is not None:
            rows, parts = batch[0].stored.rows, [layers.part for layers in batch]
            found: torch.Tensor = self._kernels.sums(
                staging, parts, dim=rows.shape[-1], itemsize=rows.itemsize
            )
            return found
        of_parts = [
            sums(part.view(staging).flatten(2), row_bytes=part.stored.row_bytes).flatten() for part in batch
        ]
        return torch.cat(of_parts)

    def _to_host(self, numbers: torch.Tensor) -> torch.Tensor:
        # Only a copy to pinned memory does not block. torch reuses the memory only after the copy.
        found = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        found.copy_(numbers, non_blocking=True)
        return found

    def _movements_of(self, layout: KVLayout) -> MovementTable:
        """Return the movements of a layout on the device; they are copied there once."""
        if id(layout) not in self._movements:  # the entry holds the layout, so that no other gets its id
            self._movements[id(layout)] = layout, MovementTable(layout.planes, self._device)
        _, table = self._movements[id(layout)]
        return table

    def _stream(self, stream: Stream) -> Any:
        if stream is Stream.VLLM:
            return torch.cuda.current_stream(self._device)
        return self._streams[stream]

    @contextmanager
    def _in(self, stream: Stream) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[stream]):
            yield


def _kernels() -> tuple[Any, Any]:
    """Return the modules of our kernels; None without Triton, which they import."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return None, None
    from kvshare.vllm_connector.worker import block_kernels, kernels

    return kernels, block_kernels


def _places(
    batch: Sequence[StagedLayers], staging: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the places of a batch's rows in staging, and where they are stored."""
    there, here = [], []
    for layers in batch:
        start = layers.offset
        for rows in layers.rows:
            there.append(staging[start : start + rows.nbytes].view(rows.dtype).view(rows.shape))
            here.append(rows)
            start += rows.nbytes
    return there, here
