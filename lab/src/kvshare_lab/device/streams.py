"""
What the connector's loads and saves ask of a GPU (`worker/gpu.py`), on the simulated one.

Each call costs the launches of `worker/cuda.py` and `worker/kernels.py`, and the bytes that they move. The
tables that kernels read are made as they are there: their bytes are counted, their making is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from delta_tree import Span
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.gpu import Stream
from kvshare.vllm_connector.worker.kernel_tables import StagedCopy, StagingForm, SumTable, TokenTable
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.staged_layers import StagedLayers, loaded, saved
from kvshare_lab.device.gpu import MAIN, THERE, SimulatedGpu

_ANGLE_LAUNCHES = 3  # where anything moves: the product, its cosines and its sines


class SimulatedStreams:
    """See `Gpu`. Events are times."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
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
        return self._gpu.reached_at(_name(stream))

    def wait(self, stream: Stream, event: float) -> None:
        self._gpu.call()
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
        with self._gpu.on_stream(_name(Stream.UP)):
            self._gpu.copy_up(_stored_bytes(batch))

    def down(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> None:
        with self._gpu.on_stream(_name(Stream.DOWN)):
            self._gpu.copy_down(_stored_bytes(batch))

    def check(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> torch.Tensor:
        expected = np.concatenate([part.sums() for part in batch])
        with self._gpu.on_stream(_name(Stream.WRITE)):
            self._gpu.copy_up(expected.nbytes)
            self._add_up(staging, batch)
            self._gpu.move(2 * expected.nbytes)  # the comparison
            self._gpu.copy_down(len(expected))
        return torch.zeros(len(expected), dtype=torch.bool)

    def sums(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> torch.Tensor:
        with self._gpu.on_stream(_name(Stream.GATHER)):
            num_pieces = self._add_up(staging, batch)
            self._gpu.copy_down(8 * num_pieces)
        return torch.zeros(num_pieces, dtype=torch.int64)

    def scatter(
        self, cache: PagedCache, staging: torch.Tensor, copies: Sequence[tuple[StagedLayers, RowCopy]]
    ) -> None:
        with self._gpu.on_stream(_name(Stream.WRITE)):
            moves = self._send_table(cache, staging, loaded(copies))
            for _ in range(_ANGLE_LAUNCHES if moves else 0):
                self._gpu.move(0)
            self._gpu.move(2 * sum(len(c.source) * _token_bytes(p) for p, c in copies))

    def gather(
        self,
        cache: PagedCache,
        staging: torch.Tensor,
        block_ids: Sequence[int],
        batch: Sequence[tuple[StagedLayers, Span]],
    ) -> None:
        with self._gpu.on_stream(_name(Stream.GATHER)):
            self._send_table(cache, staging, saved(batch, cache, block_ids))
            self._gpu.move(2 * sum(len(span) * _token_bytes(part) for part, span in batch))

    def _send_table(self, cache: PagedCache, staging: torch.Tensor, copies: Sequence[StagedCopy]) -> bool:
        """Returns whether anything moves to another position."""
        began, first = time.process_time(), cache.caches[0]
        num_blocks, num_heads, size, width = first.shape
        form = StagingForm(len(staging), width // 2, first.itemsize)
        table = TokenTable.of(
            copies, form, num_slots=num_blocks * size, num_pieces=num_heads * len(cache.caches)
        )
        self.tables_s += time.process_time() - began
        self._gpu.copy_up(table.columns.nbytes + table.shifts.nbytes + 8 * len(cache.caches))
        return len(table.shifts) > 1

    def _add_up(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> int:
        """Returns how many pieces have sums."""
        began, rows = time.process_time(), batch[0].stored.rows
        table = SumTable.of(
            [each for part in batch for each in part.parts],
            StagingForm(len(staging), rows.shape[-1], rows.itemsize),
        )
        self.tables_s += time.process_time() - began
        self._gpu.move(8 * table.num_pieces)  # zeros
        self._gpu.copy_up(table.columns.nbytes)
        self._gpu.move(_stored_bytes(batch))
        return table.num_pieces


def _name(stream: Stream) -> str:
    return MAIN if stream is Stream.VLLM else stream.value


def _stored_bytes(batch: Sequence[StagedLayers]) -> int:
    return sum(part.stored.num_tokens * _token_bytes(part) for part in batch)


def _token_bytes(part: StagedLayers) -> int:
    return part.stored.num_heads * len(part.layers) * part.stored.row_bytes
