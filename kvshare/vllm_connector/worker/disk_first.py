"""
A load whose segments are read from disk before they are copied into blocks: part by part.

    the disk     [ part 1 ][ part 2 ][ part 3 ][ part 4 ]
    UP, WRITE              [ part 1 ][ part 2 ][ part 3 ][ part 4 ]

What is in memory already is copied at once. All parts are waited for until the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from delta_tree import SegmentId
from kvshare.vllm_connector.worker.copying import LoadWork
from kvshare.vllm_connector.worker.disk_reads import Read, Reads
from kvshare.vllm_protocol.stages import DISK, HIDDEN, VERIFY, WRITE


class DiskFirst:
    """The work of a load: of each part, its reads from disk and the copies that follow them."""

    arrivals = None  # no pass begins before all of it has arrived

    def __init__(self, reads: Reads, parts: Sequence[tuple[Sequence[Read], LoadWork]]) -> None:
        self._reads, self._parts = reads, parts
        self._number, self._has_begun = 0, False  # the part whose batches are being made, or come next

    @property
    def damaged(self) -> set[SegmentId]:
        """Return the damaged segments, and those that cannot be read in time."""
        return self._reads.missing.union(*(copies.damaged for _, copies in self._parts))

    @property
    def has_room(self) -> bool:
        reads, copies = self._parts[self._number]
        return (self._has_begun or self._reads.are_over(reads)) and copies.has_room

    @property
    def is_past(self) -> bool:
        return all(copies.is_past for _, copies in self._parts)

    def batches(self) -> Iterator[None]:
        for number, (reads, copies) in enumerate(self._parts):
            if number:
                self._number, self._has_begun = number, False  # before the yield, after which is asked
                yield
            self._has_begun = True
            self._reads.settle(reads)
            yield from copies.batches()

    def wait_until_read(self) -> None:
        """Do nothing: a load reads no block."""

    def rush(self) -> None:
        """Do nothing: no pass waits for its layers."""

    def written_s(self, since: object) -> float:
        """Return 0: no pass begins before the load is done."""
        return 0.0

    def finish(self) -> Mapping[str, float]:
        """Return the seconds of all parts; `HIDDEN` is the copying that went on while others were read."""
        of_parts = [copies.finish() for _, copies in self._parts]
        stages = {stage for each in of_parts for stage in each}
        seconds = {stage: sum(each.get(stage, 0.0) for each in of_parts) for stage in stages}
        if self._reads.reads:
            read_s = [*accumulate((self._reads.seconds(reads) for reads, _ in self._parts), max)]
            copy_s = [each.get(VERIFY, 0.0) + each.get(WRITE, 0.0) for each in of_parts]
            seconds[DISK] = read_s[-1]
            if len(self._parts) > 1:
                seconds[HIDDEN] = hidden_s(read_s, copy_s)
        return seconds


def hidden_s(read_s: Sequence[float], copy_s: Sequence[float]) -> float:
    """
    Return how much less time reads and copies take together than one after the other.

    `read_s`: when each part was read; `copy_s`: how long each is copied, in turn, once it is read
    """
    over_s = 0.0
    for read, copied in zip(read_s, copy_s, strict=True):
        over_s = max(over_s, read) + copied
    return max(0.0, read_s[-1] + sum(copy_s) - over_s)
