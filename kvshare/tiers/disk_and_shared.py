"""
A disk with a shared store below it, as one tier: segments are written to both, and the disk is read first.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from delta_tree import Segment, SegmentId
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.kv_object import Rows
from kvshare.tiers.lower_tier import BusyError, LowerTier
from kvshare.tiers.shared_backend import BackendError
from kvshare.tiers.shared_tier import SharedTier
from kvshare.tiers.write_problem import WriteProblem

log = logging.getLogger(__name__)


class DiskAndShared:
    """
    A `LowerTier`. A segment counts as written once the disk has it, even if the shared store fails.
    """

    name = "disk"

    def __init__(self, disk: DiskTier, shared: SharedTier, *, makes_way: bool = False) -> None:
        """
        `makes_way`: from a full disk, segments that the store has or now gets are dropped, the oldest first;
        if that is not enough, a new segment is written to the store alone. Else the caller makes room.
        """
        self.disk, self.shared, self.form = disk, shared, disk.form
        self._makes_way = makes_way
        shared.counts_own = makes_way  # else the disk already limits this server's segments
        self._problem = WriteProblem(log, "the shared store", lost_with="this server's disk")

    @property
    def parts(self) -> Sequence[LowerTier]:
        return (self.disk, self.shared)

    @property
    def problem(self) -> str | None:
        return None

    @property
    def counts(self) -> Counter[str]:
        return self.disk.counts

    @property
    def num_bytes(self) -> int:
        return self.disk.num_bytes

    @property
    def max_bytes(self) -> int:
        return self.disk.max_bytes

    @property
    def is_swept(self) -> bool:
        return self.disk.is_swept

    def ids(self) -> list[SegmentId]:
        return list(dict.fromkeys([*self.disk.ids(), *self.shared.ids()]))

    def __len__(self) -> int:
        return len(self.disk)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self.disk or segment_id in self.shared

    def segment(self, segment_id: SegmentId) -> Segment | None:
        return self.disk.segment(segment_id) or self.shared.segment(segment_id)

    def takes(self, segment: Segment) -> bool:
        return self.disk.takes(segment)

    def write(self, segment: Segment, rows: tuple[Rows, ...]) -> None:
        """Store a segment. Raises OSError if the disk fails; if it is full, only if the store fails, too."""
        try:
            if self._makes_way:
                self._make_way(segment.num_bytes)
            self.disk.write(segment, rows)
        except OSError as exc:
            if not (self._makes_way and exc.errno == errno.ENOSPC and self._share(segment, rows)):
                raise
        else:
            self._share(segment, rows)

    def share_again(self, segment_id: SegmentId) -> bool:
        """Write a segment of the disk to the shared store, if not there. Returns whether it is there now."""
        segment = self.disk.segment(segment_id)
        if segment_id in self.shared or segment is None:
            return segment_id in self.shared
        try:
            rows = self.disk.read(segment_id)
        except BusyError:
            return False
        return rows is not None and self._share(segment, rows)

    def read(self, segment_id: SegmentId) -> tuple[Rows, ...] | None:
        rows = self.disk.read(segment_id)
        return self.shared.read(segment_id) if rows is None else rows

    def drop(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        entries = list(segment_ids)
        return list(dict.fromkeys([*self.disk.drop(entries), *self.shared.drop(entries)]))

    def sweep(self) -> bool:
        return self.disk.sweep()

    def close(self) -> None:
        self.shared.close()

    def _make_way(self, num_bytes: int) -> None:
        """Drop shared segments from a full disk. Raises OSError if `num_bytes` more still do not fit."""
        excess = self.disk.num_bytes + num_bytes - self.disk.max_bytes
        may_ask = True
        for segment_id in self.disk.ids() if excess > 0 else ():
            segment = self.disk.segment(segment_id)
            if segment is None or not (segment_id in self.shared or (may_ask and self._gets(segment))):
                may_ask = self.shared.problem is None  # else the next segment would wait for the store, too
                continue
            self.disk.drop([segment_id])
            excess -= segment.num_bytes
            if excess <= 0:
                return
        if excess > 0:
            raise OSError(errno.ENOSPC, "it is full of what the shared store has not")

    def _gets(self, segment: Segment) -> bool:
        """Return whether the store has the segment, perhaps from another process, or now gets it."""
        try:
            return self.shared.finds(segment) or self.share_again(segment.segment_id)
        except BackendError:
            return False

    def _share(self, segment: Segment, rows: tuple[Rows, ...]) -> bool:
        if not self.shared.takes(segment):
            return False
        try:
            self.shared.write(segment, rows)
        except OSError as exc:
            self._problem.note(exc)
            return False
        self._problem.end()
        return True
