"""The interface of a tier below memory: threads write and read whole segments by id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from delta_tree import Segment, SegmentId
from kvshare.tiers.kv_object import ObjectForm, Rows


class BusyError(Exception):
    """An object cannot be read now, but may be whole."""


class LowerTier(Protocol):
    """A disk, or a store that several servers share. Thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def form(self) -> ObjectForm: ...

    @property
    def counts(self) -> Counter[str]:
        """Return how many objects were written, read, damaged, failed."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def max_bytes(self) -> int: ...

    @property
    def problem(self) -> str | None:
        """Return why the tier is not used now, unless its writer reports that itself; else None."""

    @property
    def parts(self) -> Sequence[LowerTier]:
        """Return the tiers that this one consists of, the nearest first; itself if it has no parts."""

    def ids(self) -> list[SegmentId]: ...

    def __len__(self) -> int: ...

    def __contains__(self, segment_id: object) -> bool: ...

    def segment(self, segment_id: SegmentId) -> Segment | None:
        """Return what is known of a segment that is held."""

    def takes(self, segment: Segment) -> bool:
        """Return whether such a segment is written at all."""

    def write(self, segment: Segment, rows: tuple[Rows, ...]) -> None:
        """Store a segment. Raises OSError; the segment is not held then."""

    def read(self, segment_id: SegmentId) -> tuple[Rows, ...] | None:
        """
        Return the bytes of a segment, which match their checks; None if it is not held, or was just dropped.

        Raises:  BusyError if it cannot be read now
        """

    def drop(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        """Forget segments; unknown ids are ignored. Returns those held."""

    def sweep(self) -> bool:
        """Delete one thing that no segment needs. Returns whether there was one. For one thread."""

    def close(self) -> None:
        """Release what the tier holds open. Nothing is read or written after this."""

    @property
    def is_swept(self) -> bool:
        """Return whether nothing must be deleted before more is written."""
