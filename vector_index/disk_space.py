"""
Whether there is room to write to an index whose files are mapped into memory.

The files are sparse, and their holes are filled as points come in. Where the disk is full, the
kernel answers such a write with SIGBUS, which ends the process; there is no exception to catch. So
nothing may be written from well before that point on, and the room is looked at before each write.
"""

import logging
import os
from pathlib import Path

from vector_index.errors import IndexPausedError

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 64 * 2**20
_RESUME_AT = 1.25  # of the floor: at the floor itself an index that writes would pause again at once


class DiskSpace:
    """
    The free space of the file system that a folder is or will be on, against a floor.

    It logs when the floor is crossed, once in each direction.
    """

    def __init__(self, folder: Path, min_free_bytes: int) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._is_low = False

    def free_bytes(self) -> int:
        """What programs may still write there; 0 where nobody can tell."""
        try:
            folder = self._folder.absolute()
            found = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
        except (OSError, StopIteration):
            return 0
        return found.f_bavail * found.f_frsize

    def why_low(self) -> str | None:
        """Looks anew: what is wrong, in words without a path, or None where there is room."""
        free = self.free_bytes()
        floor = self._min_free_bytes * (_RESUME_AT if self._is_low else 1.0)
        is_low = free < floor
        if is_low and not self._is_low:
            log.warning(
                "the index is not written any more: %s are free at %s, and %s must stay so. Until there is "
                "room, new prompts are found by equal prefixes only. Free some space; no restart is needed",
                megabytes(free),
                self._folder,
                megabytes(self._min_free_bytes),
            )
        elif self._is_low and not is_low:
            log.warning("the index is written again: %s are free at %s", megabytes(free), self._folder)
        self._is_low = is_low
        return f"{megabytes(free)} of disk are free, {megabytes(floor)} are needed" if is_low else None

    def check(self) -> None:
        """
        To be called before every write.

        Raises:  IndexPausedError
        """
        if (reason := self.why_low()) is not None:
            raise IndexPausedError(reason)

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether so much may be written and the floor is still kept."""
        return self.free_bytes() - num_bytes >= self._min_free_bytes


def megabytes(num_bytes: float) -> str:
    """For people: the disk's size does not matter here, a few MB do."""
    return f"{num_bytes / 1e6:,.1f} MB"
