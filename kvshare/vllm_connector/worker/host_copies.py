"""
Loads and saves of a CPU worker: the thread that copies does all of it, a batch of segments at a time.

Every byte is read from memory once: the sum of a layer is computed just before or after its rows are copied,
while they are in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from delta_tree import SegmentId, Span
from kvshare.kv.sums import sums
from kvshare.vllm_connector.worker.copy_writer import LayerRows, RowCopy, write_layers
from kvshare.vllm_connector.worker.copying import LapTimer
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_protocol.stages import SAVE, VERIFY, WRITE

_BATCH_BYTES = 32 * 1024**2  # after so many bytes the thread checks whether another job is due


class HostLoad:
    """
    Rows of segments, from host memory into vLLM's blocks.

    `damaged`: the segments whose sums are not the stored ones; their rows are written all the same.
    """

    has_room = is_past = True
    arrivals = None  # an early pass would only compete with the load

    def __init__(self, cache: PagedCache, find_copies: Callable[[], Sequence[RowCopy]]) -> None:
        """`find_copies` is called by the thread that copies."""
        self.damaged: set[SegmentId] = set()
        self._cache, self._find_copies = cache, find_copies
        self._verify_s = self._write_s = 0.0

    def batches(self) -> Iterator[None]:
        lap = LapTimer()
        by_segment: dict[Stored, list[RowCopy]] = {}
        for copy in self._find_copies():
            by_segment.setdefault(copy.stored, []).append(copy)
        self._write_s += lap()
        for number, segments in enumerate(_batches(list(by_segment))):
            if number:
                yield
            self._write(segments, [copy for stored in segments for copy in by_segment[stored]])

    def wait_until_read(self) -> None:
        """All is done."""

    def rush(self) -> None:
        """Do nothing: there is always room."""

    def written_s(self, since: object) -> float:
        """Return 0: no pass begins before the load is done."""
        return 0.0

    def finish(self) -> Mapping[str, float]:
        return {VERIFY: self._verify_s, WRITE: self._write_s}

    def _write(self, segments: Sequence[Stored], copies: Sequence[RowCopy]) -> None:
        lap, verify_s = LapTimer(), 0.0
        layer_sums = [LayerSums(stored) for stored in segments]

        def add_up(layer: int) -> None:
            nonlocal verify_s
            began = LapTimer()
            for of_segment in layer_sums:
                of_segment.add_up(layer)
            verify_s += began()

        rows = [LayerRows(copy.stored.rows, range(copy.stored.num_layers), copy) for copy in copies]
        write_layers(self._cache, rows, before_layer=add_up)
        self._compare(layer_sums)
        self._verify_s += verify_s
        self._write_s += lap() - verify_s

    def _compare(self, layer_sums: Sequence[LayerSums]) -> None:
        self.damaged |= {each.stored.segment_id for each in layer_sums if not each.is_as_stored}


class HostSave:
    """Rows of spans of a request, from vLLM's blocks into segments."""

    has_room = is_past = True

    def __init__(
        self, cache: PagedCache, block_ids: Sequence[int], targets: Sequence[tuple[Stored, Span]]
    ) -> None:
        self._cache, self._block_ids = cache, block_ids
        self._spans = dict(targets)
        self._seconds = 0.0

    def batches(self) -> Iterator[None]:
        for number, segments in enumerate(_batches(list(self._spans))):
            if number:
                yield
            lap = LapTimer()
            self._copy(segments)
            self._seconds += lap()

    def wait_until_read(self) -> None:
        """All is done."""

    def finish(self) -> Mapping[str, float]:
        return {SAVE: self._seconds} if self._spans else {}

    def _copy(self, segments: Sequence[Stored]) -> None:
        layer_sums = [LayerSums(stored) for stored in segments]
        spans, rows = [self._spans[stored] for stored in segments], [stored.rows for stored in segments]
        for layer in self._cache.gather_by_layer(self._block_ids, spans, rows):
            for of_segment in layer_sums:
                of_segment.add_up(layer)
        for of_segment in layer_sums:
            of_segment.store()


class LayerSums:
    """The sums of a segment, layer by layer."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self._pieces = stored.rows.flatten(2)
        self._sums = torch.zeros(self._pieces.shape[:2], dtype=torch.int64)

    def add_up(self, layer: int) -> None:
        self._sums[:, layer] = sums(self._pieces[:, layer], row_bytes=self.stored.row_bytes)

    def store(self) -> None:
        self.stored.sums = self._sums.numpy()

    @property
    def is_as_stored(self) -> bool:
        return self.stored.sums is not None and bool((self._sums.numpy() == self.stored.sums).all())


def _batches(segments: Sequence[Stored]) -> Iterator[Sequence[Stored]]:
    """Make batches of limited size, each of at least one segment."""
    start = num_bytes = 0
    for index, stored in enumerate(segments):
        if index > start and num_bytes + stored.rows.nbytes > _BATCH_BYTES:
            yield segments[start:index]
            start, num_bytes = index, 0
        num_bytes += stored.rows.nbytes
    if start < len(segments):
        yield segments[start:]
