"""A load whose segments are read from disk before they are copied into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from delta_tree import SegmentId
from kvshare.vllm_connector.worker.copying import LoadWork
from kvshare.vllm_connector.worker.disk_reads import Reads
from kvshare.vllm_protocol.stages import DISK


class DiskFirst:
    """The work of a load that begins to copy when its reads from disk are over."""

    arrivals = None  # no pass begins before all of it has arrived

    def __init__(self, reads: Reads, stored: LoadWork) -> None:
        self._reads, self._stored = reads, stored
        self._has_begun = False

    @property
    def damaged(self) -> set[SegmentId]:
        """Return the damaged segments, and those that cannot be read in time."""
        return self._stored.damaged | self._reads.missing

    @property
    def has_room(self) -> bool:
        return (self._has_begun or self._reads.are_over) and self._stored.has_room

    @property
    def is_past(self) -> bool:
        return self._stored.is_past

    def batches(self) -> Iterator[None]:
        self._has_begun = True
        self._reads.settle()
        yield from self._stored.batches()

    def wait_until_read(self) -> None:
        """Do nothing: a load reads no block."""

    def rush(self) -> None:
        """Do nothing: no pass waits for its layers."""

    def written_s(self, since: object) -> float:
        """Return 0: no pass begins before the load is done."""
        return 0.0

    def finish(self) -> Mapping[str, float]:
        found = self._stored.finish()
        return {**found, DISK: self._reads.seconds} if self._reads.reads else found
