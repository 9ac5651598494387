"""
What the connector's loads and saves ask of a GPU (`worker/gpu.py`), on the simulated one.

Each call costs the launches of `worker/cuda.py` and `worker/kernels.py`, and the bytes that they move. The
tables that kernels read are made as they are there: their bytes are counted, their making is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from delta_tree import Span
from kvshare.vllm_connector.worker.block_rows import BlockCopy, slot_table
from kvshare.vllm_connector.worker.gpu import Stream
from kvshare.vllm_connector.worker.kernel_tables import StagedCopy, StagingForm, SumTable
from kvshare.vllm_connector.worker.kernel_token_tables import PartTable, TokenTable
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.staged_layers import StagedLayers, saved
from kvshare.vllm_connector.worker.staged_load import StagedLoad
from kvshare_lab.device.gpu import MAIN, THERE, SimulatedGpu

_ANGLE_LAUNCHES = 3  # where anything moves: the product, its cosines and its sines


class _Begun(NamedTuple):
    """A load between its batches."""

    load: StagedLoad
    tokens: TokenTable


class _Event(float):
    """A time. `num_kernels`: since its stream has waited last."""

    num_kernels = 0


class SimulatedStreams:
    """See `Gpu`. Events are times."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._kernels_before: dict[Stream, int] = {}  # the last wait of a stream
        self.tables_s = 0.0  # of this machine's CPU

    def register(self, buffer: torch.Tensor) -> None:
        """Its copies cost as those of registered memory."""

    def enter_thread(self) -> None:
        """There is one GPU."""

    def simplify(self) -> bool:
        return False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=THERE)

    def record(self, stream: Stream) -> float:
        self._gpu.call()
        event = _Event(self._gpu.reached_at(_name(stream)))
        event.num_kernels = self._gpu.kernels[_name(stream)] - self._kernels_before.get(stream, 0)
        return event

    def wait(self, stream: Stream, event: float) -> None:
        self._gpu.call()
        self._kernels_before[stream] = self._gpu.kernels[_name(stream)]
        if stream is Stream.VLLM and isinstance(event, _Event):  # its kernels go on beside vLLM's
            event = event + event.num_kernels * self._gpu.costs.behind_s
        with self._gpu.on_stream(_name(stream)):
            self._gpu.hold(event)

    def is_past(self, event: float) -> bool:
        self._gpu.call()
        self._gpu.clock.settle()
        return event <= self._gpu.clock.now()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin if end <= self._gpu.clock.now() else None

    def read(self, result: torch.Tensor) -> torch.Tensor:
        self._gpu.copy_down(result.nbytes)
        return self._gpu.drawn(result)

    def up(self, batch: Sequence[StagedLayers], staging: torch.Tensor) -> None:
        self._gpu.clock.spend(sum(map(_num_pieces, batch)) * self._gpu.costs.stored_piece_s)
        with self._gpu.on_stream(_name(Stream.UP)):
            self._gpu.copy_up(_stored_bytes(batch))

    def down(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> None:
        with self._gpu.on_stream(_name(Stream.DOWN)):
            self._gpu.copy_down(_stored_bytes(batch))

    def begin_load(self, cache: PagedCache, load: StagedLoad) -> _Begun:
        began = time.process_time()
        num_blocks, _, size, _ = cache.caches[0].shape
        tokens = TokenTable.of(load.copies, _form(cache, 0), num_slots=num_blocks * size)
        self.tables_s += time.process_time() - began
        expected = load.sums()
        with self._gpu.on_stream(_name(Stream.WRITE)):
            self._gpu.copy_up(tokens.columns.nbytes + tokens.shifts.nbytes + 8 * len(cache.caches))
            for _ in range(_ANGLE_LAUNCHES if len(tokens.shifts) > 1 else 0):
                self._gpu.move(0)
            self._gpu.copy_up(2 * expected.nbytes)
        return _Begun(load, tokens)

    def check(self, cache: PagedCache, begun: _Begun, number: int, staging: torch.Tensor) -> None:
        began, load, (_, num_heads, *_) = time.process_time(), begun.load, cache.caches[0].shape
        form = _form(cache, len(staging))
        parts = PartTable.of(
            load.parts(number), begun.tokens, form, num_heads=num_heads, num_layers=len(cache.caches)
        )
        summed = SumTable.of([layers.part for layers in load.batches[number]], form)
        self.tables_s += time.process_time() - began
        with self._gpu.on_stream(_name(Stream.WRITE)):
            self._gpu.copy_up(parts.columns.nbytes + parts.programs.nbytes + summed.columns.nbytes)
            self._gpu.move(_stored_bytes(load.batches[number]))

    def scatter(self, cache: PagedCache, begun: _Begun, number: int, staging: torch.Tensor) -> None:
        with self._gpu.on_stream(_name(Stream.WRITE)):
            pairs = begun.load.pairs(number)
            self._gpu.move(2 * sum(len(copy.source) * _token_bytes(layers) for layers, copy in pairs))

    def compare(self, begun: _Begun) -> torch.Tensor:
        with self._gpu.on_stream(_name(Stream.WRITE)):
            self._gpu.move(2 * 8 * begun.load.num_pieces)
            self._gpu.copy_down(begun.load.num_pieces)
        return torch.zeros(begun.load.num_pieces, dtype=torch.bool)

    def sums(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> torch.Tensor:
        with self._gpu.on_stream(_name(Stream.GATHER)):
            num_pieces = self._add_up(staging, batch)
            self._gpu.copy_down(8 * num_pieces)
        return torch.zeros(num_pieces, dtype=torch.int64)

    def copy_blocks(self, cache: PagedCache, copies: Sequence[BlockCopy]) -> None:
        began = time.process_time()
        table = slot_table(cache, copies)
        self.tables_s += time.process_time() - began
        self._gpu.clock.spend(self._gpu.costs.blocks_launch_s)
        with self._gpu.on_stream(_name(Stream.BLOCKS)):
            self._gpu.copy_up(table.columns.nbytes + table.shifts.nbytes + 8 * len(cache.caches))
            for _ in range(_ANGLE_LAUNCHES if len(table.shifts) > 1 else 0):
                self._gpu.move(0)
            self._gpu.move(2 * table.columns.shape[1] * cache.kv_layout.bytes_per_token)

    def gather(
        self,
        cache: PagedCache,
        staging: torch.Tensor,
        block_ids: Sequence[int],
        batch: Sequence[tuple[StagedLayers, Span]],
    ) -> None:
        with self._gpu.on_stream(_name(Stream.GATHER)):
            self._send_tables(cache, staging, saved(batch, cache, block_ids))
            self._gpu.move(2 * sum(len(span) * _token_bytes(part) for part, span in batch))

    def _send_tables(self, cache: PagedCache, staging: torch.Tensor, copies: Sequence[StagedCopy]) -> None:
        began, (num_blocks, num_heads, size, _) = time.process_time(), cache.caches[0].shape
        form = _form(cache, len(staging))
        tokens = TokenTable.of(copies, form, num_slots=num_blocks * size)
        parts = PartTable.of(
            {number: copy.part for number, copy in enumerate(copies)},
            tokens,
            form,
            num_heads=num_heads,
            num_layers=len(cache.caches),
        )
        self.tables_s += time.process_time() - began
        of_parts = parts.columns.nbytes + parts.programs.nbytes
        self._gpu.copy_up(tokens.columns.nbytes + of_parts + 8 * len(cache.caches))

    def _add_up(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> int:
        """Returns how many pieces have sums."""
        began, rows = time.process_time(), batch[0].stored.rows
        table = SumTable.of(
            [layers.part for layers in batch],
            StagingForm(len(staging), rows.shape[-1], rows.itemsize),
        )
        self.tables_s += time.process_time() - began
        self._gpu.move(8 * table.num_pieces)  # zeros
        self._gpu.copy_up(table.columns.nbytes)
        self._gpu.move(_stored_bytes(batch))
        return table.num_pieces


def _form(cache: PagedCache, staging_bytes: int) -> StagingForm:
    first = cache.caches[0]
    return StagingForm(staging_bytes, first.shape[3] // 2, first.itemsize)


def _name(stream: Stream) -> str:
    return MAIN if stream is Stream.VLLM else stream.value


def _stored_bytes(batch: Sequence[StagedLayers]) -> int:
    return sum(part.stored.num_tokens * _token_bytes(part) for part in batch)


def _token_bytes(part: StagedLayers) -> int:
    return part.stored.num_heads * len(part.layers) * part.stored.row_bytes


def _num_pieces(part: StagedLayers) -> int:
    """Of host memory: the heads of a segment lie one after the other, each with all its layers."""
    return 1 if part.is_whole else part.stored.num_heads
