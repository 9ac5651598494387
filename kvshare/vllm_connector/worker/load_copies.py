"""Makes the list of a load's copies from host memory and from blocks. Runs on the thread that copies."""

from __future__ import annotations

from collections.abc import Mapping

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import LoadRequest
from kvshare.vllm_connector.worker.block_rows import BlockCopy
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.disk_reads import Reads
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import Stored


def row_copies(
    cache: PagedCache,
    load: LoadRequest,
    held: Mapping[SegmentId, Stored],
    reads: Reads | None = None,
    part: int = 0,
) -> list[RowCopy]:
    """
    Make the copies from `held` segments, for a part of the cache, without those of missing segments.
    """
    copies, missing = [], frozenset() if reads is None else reads.missing
    for copy, target in load.targets():
        if copy not in load.sources and (stored := held.get(copy.segment_id)) is not None:
            if copy.segment_id in missing:
                continue
            start = copy.offset + target.start - copy.target_start
            slots = cache.slot_numbers(load.block_ids, target)
            copies.append(RowCopy(stored.parts[part], Span(start, start + len(target)), copy.shift, slots))
    return copies


def block_copies(cache: PagedCache, load: LoadRequest) -> list[BlockCopy]:
    """Make the copies from blocks."""
    copies = []
    for copy, target in load.targets():
        if (source := load.sources.get(copy)) is not None:
            rows = Span(source.first, source.first + len(target))
            slots = cache.slot_numbers(load.block_ids, target)
            copies.append(BlockCopy(source.block_ids, rows, copy.shift, slots))
    return copies
