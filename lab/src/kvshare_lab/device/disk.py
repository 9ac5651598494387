"""
A disk below the memory of the simulated worker: its files have sizes and no bytes, and are read one after the
other. What the connector asks of a disk, and by when it has given up, is the connector's.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import SegmentId
from kvshare.kv.layout import KVLayout
from kvshare.vllm_connector.metadata import DiskReport, WriteRequest
from kvshare.vllm_connector.worker.disk_reads import Read, Reads
from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored
from kvshare_lab.device.clock import Clock

_LATENCY_S = 1e-4  # of a read of an NVMe drive


class SimulatedDisk:
    """`bytes_per_s` may be changed between requests."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self.clock, self.bytes_per_s = clock, bytes_per_s
        self._free_at = 0.0

    def read(self, num_bytes: int) -> float:
        """When a read that begins now is over. Those before it come first."""
        self._free_at = max(self._free_at, self.clock.now()) + num_bytes / self.bytes_per_s
        return self._free_at + _LATENCY_S


class _SimulatedRead(Read):
    """Over at a time of the simulation."""

    def __init__(self, segment_id: SegmentId, disk: SimulatedDisk, num_bytes: int) -> None:
        whole: Future[bool | None] = Future()
        whole.set_result(True)
        super().__init__(segment_id, whole)
        self._clock, self._over_at = disk.clock, disk.read(num_bytes)

    @property
    def is_over(self) -> bool:
        return self._clock.now() >= self._over_at

    @property
    def ended_s(self) -> float:
        return min(self._clock.now(), self._over_at)


class SimulatedDiskStore(SegmentStore):
    """What is saved is on disk at once: writing is not simulated."""

    def __init__(
        self, buffer: torch.Tensor, layout: KVLayout, *, num_heads: int, disk: SimulatedDisk
    ) -> None:
        super().__init__(buffer, layout, num_heads=num_heads)
        self._disk = disk
        self._files: dict[SegmentId, tuple[int, NDArray[np.int64] | None]] = {}  # tokens and sums
        self._reads: dict[Stored, Read] = {}
        self._written: list[SegmentId] = []

    def write(self, requests: Iterable[WriteRequest]) -> None:
        for request in requests:
            if (stored := self._stored.get(request.segment_id)) is not None:
                self._files[request.segment_id] = stored.num_tokens, stored.sums
                self._written.append(request.segment_id)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        entries = list(segment_ids)
        self.evict(entries)
        for segment_id in entries:
            self._files.pop(segment_id, None)

    def reads(self, segment_ids: Iterable[SegmentId], *, within_s: float) -> Reads | None:
        found = []
        for segment_id in segment_ids:
            stored = self._stored.get(segment_id)
            if stored is not None and (read := self._reads.get(stored)) is not None:
                found.append(read)
            elif stored is None and (file := self._files.get(segment_id)) is not None:
                found.append(self._begin_read(segment_id, *file))
        return Reads(found, (), within_s=within_s) if found else None

    def _begin_read(self, segment_id: SegmentId, num_tokens: int, sums: NDArray[np.int64] | None) -> Read:
        stored = self.add(segment_id, num_tokens)
        stored.sums = sums
        read = self._reads[stored] = _SimulatedRead(segment_id, self._disk, stored.num_bytes)
        self.hold([stored])
        return read

    def take_disk_report(self) -> DiskReport | None:
        for stored in [stored for stored, read in self._reads.items() if read.is_over]:
            del self._reads[stored]
            self.release([stored])
        written, self._written = self._written, []
        return DiskReport(tuple(written)) if written else None
