"""
Segments that replicas hold and no prompt may use: what the last run of this server has left, and what
replicas have found in a store that they share. Those are dropped after some time; a store keeps them, as they
may be another proxy's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from delta_tree import SegmentId
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.runtime import Runtime

GRACE_S: Final = 30.0  # a replica holds a segment some time before it, or another one, reports its prompt


class Orphans:
    """One per server. Calls for one replica are sequential."""

    def __init__(self, runtime: Runtime[ReplicaKeeper]) -> None:
        self._runtime = runtime
        self._due: dict[str, deque[tuple[float, tuple[SegmentId, ...]]]] = {}  # by replica

    def begin(self, replica: str, held: Iterable[SegmentId]) -> None:
        """It is connected, and holds exactly these."""
        self._due[replica] = deque()
        self.note(replica, held)

    def note(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        self._due.setdefault(replica, deque()).append((time.monotonic() + GRACE_S, tuple(segment_ids)))

    async def tidy(self, replica: str) -> None:
        """Have the replica drop those that no prompt uses after this time."""
        due = self._due.get(replica, ())
        while due and due[0][0] <= time.monotonic():
            _, segment_ids = due.popleft()
            await self._runtime.write(self._runtime.keeper.drop_orphans, replica, segment_ids)
