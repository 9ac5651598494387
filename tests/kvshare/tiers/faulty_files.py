"""Files that fail, wait, or stop as the machine does."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvshare.tiers.files import Files


class FaultyFiles(Files):
    """Fails as `fault` says: it gets the name of each call and returns the number of an error, or None."""

    def __init__(self, fault: Callable[[str], int | None]) -> None:
        self.fault = fault

    def _call(self, name: str) -> None:
        if (number := self.fault(name)) is not None:
            raise OSError(number, os.strerror(number))

    def create(self, path: Path) -> int:
        self._call("create")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        """A write that fails has written a part."""
        try:
            self._call("write")
        except OSError:
            super().write(descriptor, data[: len(data) // 2])
            raise
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._call("sync")
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        super().rename(source, target)

    def delete(self, path: Path) -> None:
        self._call("delete")
        super().delete(path)

    def open(self, path: Path) -> int:
        self._call("open")
        return super().open(path)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        self._call("read")
        return super().read(descriptor, into, offset)


def failing(call: str, number: int = errno.EIO) -> FaultyFiles:
    """All calls of this name fail."""
    return FaultyFiles(lambda name: number if name == call else None)


class WaitingFiles(Files):
    """Reads wait until `may_read` is set; writes until `may_write` is."""

    def __init__(self) -> None:
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.may_read.wait(120)
        return super().read(descriptor, into, offset)

    def write(self, descriptor: int, data: memoryview) -> int:
        self.may_write.wait(120)
        return super().write(descriptor, data)


class ShortFiles(Files):
    """Reads and writes at most some bytes at once, as the system may."""

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        return super().read(descriptor, into[:100], offset)

    def write(self, descriptor: int, data: memoryview) -> int:
        return super().write(descriptor, data[:1000])
