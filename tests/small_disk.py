"""
A file system of some megabytes, for a server that is to run out of disk.

It is a tmpfs in a mount namespace of the server's own: nothing is mounted on the machine, and it goes with
the process. Root may do that, and others where the kernel gives them a user namespace.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_WAYS = (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount"))


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """`command` goes before a process's own: it makes the disk at `folder`, then becomes that process."""

    folder: Path
    command: tuple[str, ...]

    def filler(self, pid: int) -> Filler:
        """For the test, to fill the disk that this process sees."""
        return Filler(Path(f"/proc/{pid}/root{self.folder}"))


@dataclass(frozen=True, slots=True)
class Filler:
    """A file that takes what the disk has."""

    folder: Path

    def fill(self, *, leave: int = 0) -> None:
        """Write until only so many bytes are free."""
        with (self.folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
            while (room := self.free_bytes() - leave) > 0:
                file.write(bytes(min(room, 1 << 20)))

    def empty(self) -> None:
        """Free what was taken."""
        (self.folder / "filler").unlink()

    def free_bytes(self) -> int:
        """What is left."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


def small_disk(folder: Path, num_bytes: int, *, num_filled: int = 0, options: str = "") -> SmallDisk | None:
    """A disk of that size at `folder`, some of it taken; None where this process may not have one."""
    folder.mkdir()
    make = f"mount -t tmpfs -o size={num_bytes} kvshare-test '{folder}'"
    fill = f"head -c {num_filled} /dev/zero > '{folder}/filler'"
    then = f" && mount -o remount,{options} '{folder}'" if options else ""
    for way in _WAYS:
        with suppress(FileNotFoundError):
            if subprocess.run([*way, "sh", "-c", make], capture_output=True, check=False).returncode == 0:
                shell = ("sh", "-c", f'{make} && {fill}{then} && exec "$@"', "sh")
                return SmallDisk(folder, (*way, *shell))
    return None
