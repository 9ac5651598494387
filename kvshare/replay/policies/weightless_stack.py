"""
Memory above a disk for a replay: what would be written, read and evicted, of KV that has a size and no bytes.

What leaves memory, and what prompts are evicted for, is decided as in a server (`kvshare.tiers.near_memory`,
`kvshare.sharing`). Other than there, all is written at once and read in no time.
"""

import math
from collections.abc import Iterable

from delta_tree import EvictionQueue, Segment, SegmentId
from kvshare.kv.tier import Budget, Fetched
from kvshare.replay.policies.weightless import WeightlessKV
from kvshare.status import TierStatus
from kvshare.tiers.near_memory import NearMemory
from kvshare.tiers.shares import OnDisk, Share


class WeightlessStack:
    """A `HostTier`. `num_written` and `num_read`: bytes, of the disk."""

    def __init__(self, max_bytes: int, max_disk_bytes: int, queue: EvictionQueue[SegmentId]) -> None:
        self.max_bytes, self.max_disk_bytes = max_bytes, max_disk_bytes
        self.num_disk_bytes = self.num_written = self.num_read = 0
        self.peak_bytes = self.peak_disk_bytes = 0
        self._memory: NearMemory[WeightlessKV] = NearMemory(max_bytes, queue)
        self._disk: dict[SegmentId, WeightlessKV] = {}
        self._read_now: set[SegmentId] = set()
        self.on_disk = OnDisk(lambda entry: entry not in self._memory and entry in self._disk)
        disk = Share(max_disk_bytes, lambda: self.num_disk_bytes, lambda entry: entry in self._disk)
        self.budgets: tuple[Budget, ...] = (disk,)

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._disk

    def put(self, segment: Segment, kv: WeightlessKV) -> None:
        """Store a segment, which the caller has made room for on disk."""
        self._disk[segment.segment_id] = kv
        self.num_disk_bytes += kv.num_bytes
        self.num_written += kv.num_bytes
        self._memory.put(segment.segment_id, kv, is_due=False)
        self._note_peaks()

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        for segment_id in segment_ids:
            self._memory.forget(segment_id)
            kv = self._disk.pop(segment_id, None)
            self.num_disk_bytes -= 0 if kv is None else kv.num_bytes

    def fetch(
        self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf, doubt_s: float = math.inf
    ) -> Fetched:
        """No bytes, only which segments are missing. What is read from disk is in memory then."""
        wanted = sorted(set(segment_ids))  # equal runs read in equal order
        near = self._memory.use(wanted)
        for segment_id in wanted:
            if segment_id not in near and (kv := self._disk.get(segment_id)) is not None:
                self.num_read += kv.num_bytes
                self._read_now.add(segment_id)
                self._memory.put(segment_id, kv, is_due=False)
        self._note_peaks()
        return Fetched({}, frozenset(entry for entry in wanted if entry not in self._disk))

    def take_read(self) -> frozenset[SegmentId]:
        """Return the segments that were read from disk since the last call."""
        read, self._read_now = frozenset(self._read_now), set()
        return read

    def close(self) -> None:
        """There is nothing to write."""

    def status(self) -> tuple[TierStatus, ...]:
        """A replay counts hits itself."""
        return ()

    def _note_peaks(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        self.peak_disk_bytes = max(self.peak_disk_bytes, self.num_disk_bytes)
