"""
Loads and saves of a GPU worker: the thread that copies only launches work on the GPU, batch by batch.

    load    UP      [copy batch 1][copy batch 2][copy batch 3]           vLLM's steps go on meanwhile
            WRITE                 [check, scatter 1][check, scatter 2]   not before vLLM's mark
    save    GATHER  [gather 1, sums][gather 2, sums]                     not before vLLM's mark
            DOWN                    [copy batch 1]  [copy batch 2]

Copies up do not wait for vLLM's stream, and the host waits for no copy. Batches use staging buffers in
rotation: the stream that fills a buffer waits until the last batch has left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.worker.batches_ahead import BatchesAhead
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.gpu import BegunLoad, Event, Gpu, Stream
from kvshare.vllm_connector.worker.layer_arrivals import LayerArrivals
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_connector.worker.staged_layers import StagedLayers, batches
from kvshare.vllm_connector.worker.staged_load import StagedLoad
from kvshare.vllm_protocol.stages import SAVE, VERIFY, WRITE


class Lane:
    """Staging buffers in rotation, for loads or for saves. Used by the thread that copies."""

    def __init__(self, gpu: Gpu, *, num_buffers: int, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._gpu = gpu
        self._buffers = deque((gpu.allocate(buffer_bytes), None) for _ in range(num_buffers))
        self._ahead = BatchesAhead(gpu)

    @property
    def has_room(self) -> bool:
        return self._ahead.has_room

    def take(self, filling: Stream) -> torch.Tensor:
        """Return the next buffer; stream `filling` waits until it is empty. `give_back` must follow."""
        buffer, emptied = self._buffers[0]
        if emptied is not None:
            self._gpu.wait(filling, emptied)
        return buffer

    def give_back(self, emptied: Event) -> None:
        """Return the buffer of the last `take`; it is empty after this event."""
        buffer, _ = self._buffers.popleft()
        self._buffers.append((buffer, emptied))
        self._ahead.add(emptied)


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """
    The events of a batch, as (begin, end): `crossing` between host and staging, `touching` vLLM's caches. A
    load touches them last, a save first.
    """

    crossing: tuple[Event, Event]
    touching: tuple[Event, Event]


class GpuLoad:
    """
    Rows of segments, from host memory into vLLM's blocks.

    `damaged`: the segments whose sums are not the stored ones; their rows are written all the same.
    `arrivals`: which layers have arrived.
    """

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
        self.arrivals = LayerArrivals(gpu)
        self._lane, self._gpu, self._cache = lane, gpu, cache
        self._find_copies, self._mark = find_copies, mark
        self._launched: list[Launched] = []
        self._end: Event | None = None
        self._staged: StagedLoad | None = None
        self._differing: torch.Tensor | None = None
        self._is_rushed = False

    @property
    def has_room(self) -> bool:
        return self._is_rushed or self._lane.has_room

    @property
    def is_past(self) -> bool:
        return self._end is None or self._gpu.is_past(self._end)

    def rush(self) -> None:
        self._is_rushed = True

    def written_s(self, since: Event) -> float:
        """Return for how many seconds it still wrote after an event. Called when the load is past."""
        _, written = self._launched[-1].touching
        return max(0.0, self._gpu.seconds(since, written) or 0.0)

    def batches(self) -> Iterator[None]:
        self._staged = staged = StagedLoad(self._find_copies(), self._lane.buffer_bytes)
        if not staged.batches:
            return
        self.arrivals.plan(staged.batches)
        begun = self._gpu.begin_load(self._cache, staged)
        for number in range(len(staged.batches)):
            if number:
                yield
            staging = self._lane.take(Stream.UP)
            try:
                self._launch(begun, number, staging)
            finally:
                self._end = self._gpu.record(Stream.WRITE)
                self._lane.give_back(self._end)
            self.arrivals.note(self._end)
        self._differing = self._gpu.compare(begun)
        self._end = self._gpu.record(Stream.WRITE)

    def _launch(self, begun: BegunLoad, number: int, staging: torch.Tensor) -> None:
        assert self._staged is not None
        gpu = self._gpu
        began = gpu.record(Stream.UP)
        try:
            gpu.up(self._staged.batches[number], staging)
        finally:  # after an error, too, the buffer is empty only after what was launched
            crossed = gpu.record(Stream.UP)
            gpu.wait(Stream.WRITE, crossed)
        gpu.check(self._cache, begun, number, staging)
        if not number:
            gpu.wait(Stream.WRITE, self._mark)
        writing = gpu.record(Stream.WRITE)
        gpu.scatter(self._cache, begun, number, staging)
        written = gpu.record(Stream.WRITE)
        self._launched.append(Launched((began, crossed), (writing, written)))

    def wait_until_read(self) -> None:
        """Do nothing: a load reads no block."""

    def finish(self) -> Mapping[str, float]:
        if self._staged is not None and self._differing is not None:
            self.damaged = self._staged.damaged(self._differing.numpy())
        # Batches overlap: their crossings follow each other, and the last batch is written after that.
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
        self._sums: list[tuple[Sequence[StagedLayers], torch.Tensor]] = []  # of batches, in host memory
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
            except Exception:  # the buffer is empty only after what was launched
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
        self._sums.append((batch, gpu.sums(staging, batch)))
        gpu.wait(Stream.DOWN, gpu.record(Stream.GATHER))
        began = gpu.record(Stream.DOWN)
        gpu.down(staging, batch)
        crossed = gpu.record(Stream.DOWN)
        self._launched.append(Launched((began, crossed), (gathering, gathered)))

    def wait_until_read(self) -> None:
        """Let vLLM's stream wait for the last gather; the host does not wait."""
        if self._launched:
            _, gathered = self._launched[-1].touching
            self._gpu.wait(Stream.VLLM, gathered)

    def finish(self) -> Mapping[str, float]:
        for batch, sums in self._sums[: len(self._launched)]:
            sizes = [part.stored.num_heads * len(part.layers) for part in batch]
            for part, own in zip(batch, torch.split(sums, sizes), strict=True):
                part.store_sums(own.numpy())
        if not self._launched:
            return {}
        seconds = _seconds(self._gpu, [each.crossing for each in self._launched])
        return {SAVE: seconds + _seconds(self._gpu, [each.touching for each in self._launched[:1]])}


def _seconds(gpu: Gpu, pairs: Sequence[tuple[Event, Event]]) -> float:
    return sum(gpu.seconds(begin, end) or 0.0 for begin, end in pairs)
