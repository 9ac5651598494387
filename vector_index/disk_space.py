"""
Checks for free disk space before each write to an index whose files are mapped into memory.

The files are sparse, so writing into them allocates disk blocks. On a full disk the kernel answers with
SIGBUS, which ends the process; there is no exception to catch. So writing stops well before the disk is full.
"""

import logging
import os
from pathlib import Path

from vector_index.errors import IndexPausedError

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 64 * 2**20
_RESUME_AT = 1.25  # times the threshold: at the threshold itself the next write would pause again


class DiskSpace:
    """
    Compares the free space on a folder's file system with a threshold. The folder need not exist yet.

    It logs one line when the space falls below the threshold, and one when writing resumes.
    """

    def __init__(self, folder: Path, min_free_bytes: int) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._is_low = False

    def free_bytes(self) -> int:
        """Return the bytes that programs may still write there; 0 if that cannot be determined."""
        try:
            folder = self._folder.absolute()
            stats = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
        except (OSError, StopIteration):
            return 0
        return stats.f_bavail * stats.f_frsize

    def why_low(self) -> str | None:
        """Check the free space now; returns the problem as text without a path, None if there is enough."""
        free = self.free_bytes()
        threshold = self._min_free_bytes * (_RESUME_AT if self._is_low else 1.0)
        is_low = free < threshold
        if is_low and not self._is_low:
            log.warning(
                "the index is not written any more: only %s of disk are free at %s. It is written again from "
                "%s on; until then new prompts are found by equal prefixes only. Free some space; no restart "
                "is needed",
                megabytes(free),
                self._folder,
                megabytes(_RESUME_AT * self._min_free_bytes),
            )
        elif self._is_low and not is_low:
            log.warning(
                "the index is written again: %s of disk are free at %s", megabytes(free), self._folder
            )
        self._is_low = is_low
        return f"{megabytes(free)} of disk are free, {megabytes(threshold)} are needed" if is_low else None

    def check(self) -> None:
        """Call this before every write. Raises IndexPausedError."""
        if (reason := self.why_low()) is not None:
            raise IndexPausedError(reason)

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether the free space stays above the threshold after this many bytes are written."""
        return self.free_bytes() - num_bytes >= self._min_free_bytes


def megabytes(num_bytes: float) -> str:
    """Return a size as text, in MB with one decimal."""
    return f"{num_bytes / 1e6:,.1f} MB"
