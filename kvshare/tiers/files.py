"""The calls of the disk tier to the operating system, one method each, so that tests can make them fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class Files:
    """The file system. Each method raises OSError as the system does."""

    def make_folder(self, path: Path) -> None:
        """Make a folder that only its owner can read, as for all that is stored; it may exist already."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Create a file, or empty the one of this name. Returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write `data`. Returns how many of its bytes were written, which may be fewer."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until the bytes are on the device."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename in one step: `target` is the old file or the new one, at every moment."""
        source.replace(target)

    def delete(self, path: Path) -> None:
        """Delete a file. A missing one is no error."""
        path.unlink(missing_ok=True)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Fill `into`. Returns how many bytes were read, which may be fewer; 0 at the end of the file."""
        return os.preadv(descriptor, [into], offset)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def entries(self, folder: Path) -> Iterator[tuple[str, int, bool]]:
        """Yield name, bytes and whether it is a folder for each entry; nothing if `folder` is missing."""
        try:
            listing = os.scandir(folder)
        except FileNotFoundError:
            return
        with listing:
            for entry in listing:
                try:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    yield entry.name, entry.stat(follow_symlinks=False).st_size, is_folder
                except FileNotFoundError:
                    continue  # deleted meanwhile

    def free_bytes(self, folder: Path) -> int:
        """Return the free bytes of the disk, for this user."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def remove_empty(files: Files, folder: Path) -> None:
    """Remove the empty folders in `folder`, then `folder` itself if nothing is left in it."""
    for shelf, _, _ in list(files.entries(folder)):
        with suppress(OSError):
            (folder / shelf).rmdir()
    with suppress(OSError):
        folder.rmdir()
