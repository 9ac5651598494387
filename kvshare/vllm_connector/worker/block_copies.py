"""
Copies from blocks of vLLM's cache to other blocks, with rotated keys: nothing leaves the device.

    load    [rows from other blocks] then [rows from host memory]
    CPU     the copying thread copies, one batch after the other
    GPU     it launches copies in stream BLOCKS, after vLLM's mark; copies from host memory do not wait for
            it. vLLM's stream waits for them if the load joins a step

There are no checksums: the bytes are those that vLLM itself would read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from delta_tree import Span
from kvshare.vllm_connector.worker.batches_ahead import BatchesAhead
from kvshare.vllm_connector.worker.block_rows import BlockCopy, copy_by_torch
from kvshare.vllm_connector.worker.copying import LapTimer
from kvshare.vllm_connector.worker.gpu import Event, Gpu, Stream
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_protocol.stages import BLOCKS

_HOST_BATCH_BYTES = 32 * 1024**2  # rows that are read before any of them is written
# Rows of one launch: .9 ms of an H100, 8 of an L4. The host needs more than 1 ms for each.
_GPU_BATCH_BYTES = 1024**3


FindBlockCopies = Callable[[], Sequence[BlockCopy]]
"""Called by the thread that copies."""


class HostBlockCopies:
    """On a CPU."""

    has_room = is_past = True

    def __init__(self, cache: PagedCache, find_copies: FindBlockCopies) -> None:
        self._cache, self._find_copies = cache, find_copies
        self._seconds = 0.0

    def batches(self) -> Iterator[None]:
        for number, batch in enumerate(cut(self._cache, self._find_copies(), _HOST_BATCH_BYTES)):
            if number:
                yield
            lap = LapTimer()
            copy_by_torch(self._cache, batch)
            self._seconds += lap()

    def wait_until_read(self) -> None:
        """Do nothing: everything has been read."""

    def finish(self) -> Mapping[str, float]:
        return {BLOCKS: self._seconds}


class GpuBlockCopies:
    """On a GPU."""

    def __init__(self, gpu: Gpu, cache: PagedCache, find_copies: FindBlockCopies, mark: Event) -> None:
        """`mark`: of vLLM's stream; rows are read and written after it."""
        self._gpu, self._cache = gpu, cache
        self._find_copies, self._mark = find_copies, mark
        self._begin: Event | None = None
        self._end: Event | None = None
        self._ahead = BatchesAhead(gpu)

    @property
    def has_room(self) -> bool:
        return self._ahead.has_room

    @property
    def is_past(self) -> bool:
        return self._end is None or self._gpu.is_past(self._end)

    def batches(self) -> Iterator[None]:
        self._gpu.wait(Stream.BLOCKS, self._mark)
        for number, batch in enumerate(cut(self._cache, self._find_copies(), _GPU_BATCH_BYTES)):
            if number:
                yield
            self._begin = self._begin or self._gpu.record(Stream.BLOCKS)
            try:
                self._gpu.copy_blocks(self._cache, batch)
            finally:  # after an error, too, the load ends only after what was launched
                self._end = self._gpu.record(Stream.BLOCKS)
                self._ahead.add(self._end)

    def wait_until_read(self) -> None:
        """Let vLLM's stream wait until all rows are read and written; the host does not wait."""
        if self._end is not None:
            self._gpu.wait(Stream.VLLM, self._end)

    def finish(self) -> Mapping[str, float]:
        if self._begin is None or self._end is None:
            return {}
        return {BLOCKS: self._gpu.seconds(self._begin, self._end) or 0.0}


def cut(cache: PagedCache, copies: Sequence[BlockCopy], max_bytes: int) -> Iterator[Sequence[BlockCopy]]:
    """Yield batches of `max_bytes`, at least one block each. Long copies are cut where a batch is full."""
    size = cache.block_size
    room = max_tokens = max(1, max_bytes // cache.kv_layout.bytes_per_token // size) * size
    batch: list[BlockCopy] = []
    for copy in copies:
        start = copy.source.start
        while start < copy.source.end:
            end = min(copy.source.end, start + room)
            batch.append(_part(copy, Span(start, end), size))
            room -= end - start
            start = end
            if not room:
                yield batch
                batch, room = [], max_tokens
    if batch:
        yield batch


def _part(copy: BlockCopy, span: Span, block_size: int) -> BlockCopy:
    """Return part of a copy, with only the blocks that it reads."""
    first, end = span.start // block_size, -(-span.end // block_size)
    source = Span(span.start - first * block_size, span.end - first * block_size)
    slots = copy.slots[span.start - copy.source.start : span.end - copy.source.start]
    return BlockCopy(copy.block_ids[first:end], source, copy.shift, slots)
