"""What the disk tier asks of the operating system: one method for each call, which tests make fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class Files:
    """Raises OSError as the system does."""

    def make_folder(self, path: Path) -> None:
        """Readable by its owner only, as all that is stored."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new file, or an empty one in place of a file of this name; its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Returns how many bytes were written, which may be fewer."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Until the bytes are on the device."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename in one step: `target` is the old file or the new one, at every moment."""
        source.replace(target)

    def delete(self, path: Path) -> None:
        """A missing file is deleted already."""
        path.unlink(missing_ok=True)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Returns how many bytes were read, which may be fewer; 0 at the end of the file."""
        return os.preadv(descriptor, [into], offset)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def entries(self, folder: Path) -> Iterator[tuple[str, int, bool]]:
        """Name, bytes and whether it is a folder, of all in a folder; nothing of one that is missing."""
        try:
            found = os.scandir(folder)
        except FileNotFoundError:
            return
        with found:
            for entry in found:
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
    """Remove the shelves of a folder, and the folder; not those that hold what is not ours."""
    for shelf, _, _ in list(files.entries(folder)):
        with suppress(OSError):
            (folder / shelf).rmdir()
    with suppress(OSError):
        folder.rmdir()
