"""
Loads and saves of a GPU worker: the thread that copies only asks the GPU for work, batch by batch.

    load    UP      [copy batch 1][copy batch 2][copy batch 3]           vLLM's steps go on meanwhile
            WRITE                 [check, scatter 1][check, scatter 2]   not before vLLM's mark
    save    GATHER  [gather 1, sums][gather 2, sums]                     not before vLLM's mark
            DOWN                    [copy batch 1]  [copy batch 2]

Copies up do not wait for vLLM's stream, and the host waits for none of it. Batches use staging buffers in
rotation: the stream that fills a buffer waits until its last batch has left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.gpu import Event, Gpu, Stream
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_connector.worker.staged_layers import StagedLayers, batches
from kvshare.vllm_connector.worker.times import SAVE, VERIFY, WRITE

_AHEAD = 8  # batches of a lane that the GPU is given at a time: what comes next is decided late


class Lane:
    """Staging buffers in rotation, for loads or for saves. Used by the thread that copies."""

    def __init__(self, gpu: Gpu, *, num_buffers: int, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._gpu = gpu
        self._buffers = deque((gpu.allocate(buffer_bytes), None) for _ in range(num_buffers))
        self._under_way: deque[Event] = deque()

    @property
    def has_room(self) -> bool:
        while self._under_way and self._gpu.is_past(self._under_way[0]):
            self._under_way.popleft()
        return len(self._under_way) < _AHEAD

    def take(self, filling: Stream) -> torch.Tensor:
        """The next buffer; what fills it waits until it is empty. `give_back` must follow."""
        buffer, emptied = self._buffers[0]
        if emptied is not None:
            self._gpu.wait(filling, emptied)
        return buffer

    def give_back(self, emptied: Event) -> None:
        """Its batch leaves it before this event."""
        buffer, _ = self._buffers.popleft()
        self._buffers.append((buffer, emptied))
        self._under_way.append(emptied)


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """
    A batch under way. `numbers`: of its pieces, in host memory, readable at the end.

    Its bytes cross from `began` to `crossed`. Last, or first in a save, are its rows in vLLM's caches.
    """

    batch: Sequence[StagedLayers]
    numbers: torch.Tensor
    crossing: tuple[Event, Event]
    touching: tuple[Event, Event]


class GpuLoad:
    """`damaged`: the segments whose sums are not the stored ones; their rows are written all the same."""

    def __init__(
        self,
        lane: Lane,
        gpu: Gpu,
        cache: PagedCache,
        find_copies: Callable[[], Sequence[RowCopy]],
        mark: Event,
    ) -> None:
        """`find_copies` is called by the thread that copies; rows are written after the mark of vLLM."""
        self.damaged: set[SegmentId] = set()
        self._lane, self._gpu, self._cache = lane, gpu, cache
        self._find_copies, self._mark = find_copies, mark
        self._launched: list[Launched] = []
        self._end: Event | None = None

    @property
    def has_room(self) -> bool:
        return self._lane.has_room

    @property
    def is_past(self) -> bool:
        return self._end is None or self._gpu.is_past(self._end)

    def batches(self) -> Iterator[None]:
        by_segment: dict[Stored, list[RowCopy]] = {}
        for copy in self._find_copies():
            by_segment.setdefault(copy.stored, []).append(copy)
        for batch in batches(list(by_segment), self._lane.buffer_bytes):
            if self._launched:
                yield
            staging = self._lane.take(Stream.UP)
            try:
                self._launch(batch, staging, [(part, c) for part in batch for c in by_segment[part.stored]])
            finally:
                self._end = self._gpu.record(Stream.WRITE)
                self._lane.give_back(self._end)

    def _launch(
        self,
        batch: Sequence[StagedLayers],
        staging: torch.Tensor,
        copies: Sequence[tuple[StagedLayers, RowCopy]],
    ) -> None:
        gpu = self._gpu
        began = gpu.record(Stream.UP)
        try:
            gpu.up(batch, staging)
        finally:  # what was begun ends before the buffer is empty
            crossed = gpu.record(Stream.UP)
            gpu.wait(Stream.WRITE, crossed)
        differing = gpu.check(staging, batch)
        if not self._launched:
            gpu.wait(Stream.WRITE, self._mark)
        writing = gpu.record(Stream.WRITE)
        gpu.scatter(self._cache, staging, copies)
        written = gpu.record(Stream.WRITE)
        self._launched.append(Launched(batch, differing, (began, crossed), (writing, written)))

    def wait_until_read(self) -> None:
        """A load reads no block."""

    def finish(self) -> Mapping[str, float]:
        for launched in self._launched:
            for part, differing in _of_parts(launched):
                if differing.any():
                    self.damaged.add(part.stored.segment_id)
        # Batches overlap: all cross one after the other, and the last one is written after that.
        seconds = _seconds(self._gpu, [each.crossing for each in self._launched])
        seconds += _seconds(self._gpu, [each.touching for each in self._launched[-1:]])
        return {VERIFY: 0.0, WRITE: seconds}


class GpuSave:
    """Rows of spans of a request, from vLLM's blocks into segments."""

    def __init__(
        self,
        lane: Lane,
        gpu: Gpu,
        cache: PagedCache,
        block_ids: Sequence[int],
        targets: Sequence[tuple[Stored, Span]],
        mark: Event,
    ) -> None:
        self._lane, self._gpu, self._cache = lane, gpu, cache
        self._block_ids, self._spans, self._mark = block_ids, dict(targets), mark
        self._launched: list[Launched] = []
        self._end: Event | None = None

    @property
    def has_room(self) -> bool:
        return self._lane.has_room

    @property
    def is_past(self) -> bool:
        return self._end is None or self._gpu.is_past(self._end)

    def batches(self) -> Iterator[None]:
        for batch in batches(list(self._spans), self._lane.buffer_bytes):
            if self._launched:
                yield
            staging = self._lane.take(Stream.GATHER)
            try:
                self._launch(batch, staging)
            except Exception:  # what was begun ends before the buffer is empty
                self._gpu.wait(Stream.DOWN, self._gpu.record(Stream.GATHER))
                raise
            finally:
                self._end = self._gpu.record(Stream.DOWN)
                self._lane.give_back(self._end)

    def _launch(self, batch: Sequence[StagedLayers], staging: torch.Tensor) -> None:
        gpu = self._gpu
        if not self._launched:
            gpu.wait(Stream.GATHER, self._mark)
        gathering = gpu.record(Stream.GATHER)
        spans = [(part, self._spans[part.stored]) for part in batch]
        gpu.gather(self._cache, staging, self._block_ids, spans)
        gathered = gpu.record(Stream.GATHER)
        sums = gpu.sums(staging, batch)
        gpu.wait(Stream.DOWN, gpu.record(Stream.GATHER))
        began = gpu.record(Stream.DOWN)
        gpu.down(staging, batch)
        crossed = gpu.record(Stream.DOWN)
        self._launched.append(Launched(batch, sums, (began, crossed), (gathering, gathered)))

    def wait_until_read(self) -> None:
        """vLLM's stream waits, the host does not."""
        if self._launched:
            _, gathered = self._launched[-1].touching
            self._gpu.wait(Stream.VLLM, gathered)

    def finish(self) -> Mapping[str, float]:
        for launched in self._launched:
            for part, sums in _of_parts(launched):
                part.store_sums(sums.numpy())
        if not self._launched:
            return {}
        seconds = _seconds(self._gpu, [each.crossing for each in self._launched])
        return {SAVE: seconds + _seconds(self._gpu, [each.touching for each in self._launched[:1]])}


def _of_parts(launched: Launched) -> Iterator[tuple[StagedLayers, torch.Tensor]]:
    """The numbers of each segment's pieces."""
    sizes = [part.stored.num_heads * len(part.layers) for part in launched.batch]
    return zip(launched.batch, torch.split(launched.numbers, sizes), strict=True)


def _seconds(gpu: Gpu, pairs: Sequence[tuple[Event, Event]]) -> float:
    return sum(gpu.seconds(begin, end) or 0.0 for begin, end in pairs)
