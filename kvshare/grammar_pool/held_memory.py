"""Bounds the memory of processes that follow answers: a key may have many answers waiting or under way."""

from __future__ import annotations

import resource
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from kvshare.errors import OverloadedError
from kvshare.grammar_pool.limits import HELD_BYTES


class HeldMemory:
    """Counts for each key. May be used by any thread."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, key: str, num_bytes: int) -> None:
        """Raises OverloadedError if that is too much for one key; nothing is added then."""
        with self._lock:
            if self._bytes[key] and self._bytes[key] + num_bytes > HELD_BYTES:
                raise OverloadedError(
                    f"the schemas of this key's answers under way hold {self._bytes[key] // 2**20} MiB, "
                    f"expected at most {HELD_BYTES // 2**20} MiB with this one; try again later"
                )
            self._bytes[key] += num_bytes

    def release(self, key: str, num_bytes: int) -> None:
        with self._lock:
            self._bytes[key] -= num_bytes
            self._bytes += Counter()  # without keys that hold nothing


def private_bytes(pid: int | None) -> int:
    """Memory of a process that is not of files; a forked one's counts what it shares, too. 0: unknown."""
    with suppress(OSError, ValueError):  # without /proc, or it has ended
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text("ascii").split()[:3]
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0
