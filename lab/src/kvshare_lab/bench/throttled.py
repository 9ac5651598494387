"""
`kvshare bench restart --break-even SHARE`: what a disk costs, or saves, that is slower than computing.

An engine stores prompts and stops. Another one starts on the same store, on a disk whose reads are held back:
to a share of the bytes a second at which reading a prompt's KV would take as long as computing it. The server
does not know: it has read from that disk before at full speed. Each recipient has a donor of its own, on disk
only, and is asked in full and as any client would, in turns. `waited` is how long the server has waited
for the disk, as a share of the time in full: all that the disk can cost. Once its rate is known, a part is
read while the rest is computed, which takes 1 / (1 + SHARE) of the time in full.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from delta_tree import TokenIds
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.files import Files
from kvshare.tiers.tier_stack import TierStack
from kvshare_lab.bench.figures import drop_from_page_cache
from kvshare_lab.bench.harness import Answer, ask, median

_CHUNK = 1 << 18  # bytes of a read: a slow disk gives some of a file early
ARMS = ("full", "disk")


class ThrottledFiles(Files):
    """Reads of all threads together give so many bytes a second, which may be changed."""

    def __init__(self, bytes_per_s: float, *, chunk: int = _CHUNK) -> None:
        self.bytes_per_s, self._chunk = bytes_per_s, chunk
        self._free_at = 0.0
        self._lock = threading.Lock()

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        found = super().read(descriptor, into[: self._chunk], offset)
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + found / self.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))
        return found


def disk_of(engine: EmbeddedEngine) -> tuple[TierStack, DiskTier]:
    """The tiers of a server with a store."""
    keeper = cast("MemoryKeeper[Any]", engine.sharing.keeper)
    stack = keeper.tier
    assert isinstance(stack, TierStack), "it has a store"
    disk = stack.below.parts[0]
    assert isinstance(disk, DiskTier), "the first one below memory"
    return stack, disk


@contextmanager
def throttled(engine: EmbeddedEngine, bytes_per_s: float) -> Iterator[None]:
    """Its disk reads so slowly meanwhile, and memory has nothing of what is on disk."""
    stack, disk = disk_of(engine)
    before, disk._files = disk._files, ThrottledFiles(bytes_per_s)
    stack.release(disk.ids())
    try:
        yield
    finally:
        disk._files = before


async def measured(
    engine: EmbeddedEngine, recipients: Sequence[TokenIds], *, share: float, folder: Path
) -> dict[str, Any]:
    """The first two recipients are read at full speed, so that all rates are known; the others slowly."""
    for recipient in recipients[:2]:
        for mode in (SharingMode.OFF, SharingMode.APPROX):
            await ask(engine, recipient, mode=mode)
    tokens = len(recipients[0])
    rates = engine.sharing.cost.rates
    bytes_per_s = share * tokens * rates.bytes_per_token / rates.full_s(tokens)
    drop_from_page_cache(folder)
    rows = []
    with throttled(engine, bytes_per_s):
        for number, recipient in enumerate(recipients[2:]):
            rows.append(await _asked(engine, recipient, ARMS if number % 2 else ARMS[::-1]))
    return {
        "break_even": share,
        "throttled_bytes_per_s": bytes_per_s,
        "throttled": [_row(row) for row in rows],
        "throttled_median": median([row["disk"].first_token_s / row["full"].first_token_s for row in rows]),
        "waited_most": max(_waited(row) for row in rows),
    }


async def _asked(engine: EmbeddedEngine, recipient: TokenIds, arms: Sequence[str]) -> dict[str, Answer]:
    modes = {"full": SharingMode.OFF, "disk": SharingMode.APPROX}
    return {arm: await ask(engine, recipient, mode=modes[arm]) for arm in arms}


def _waited(row: dict[str, Answer]) -> float:
    return row["disk"].finished.stage_seconds.get("fetch", 0.0) / row["full"].first_token_s


def _row(row: dict[str, Answer]) -> dict[str, Any]:
    disk, full = row["disk"], row["full"]
    return {
        "of_full": disk.first_token_s / full.first_token_s,
        "waited": _waited(row),
        "decision": disk.report.decision,
        "reason": disk.report.reason,
        "full_s": full.first_token_s,
    }
