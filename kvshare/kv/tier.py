"""Where segments' bytes are: this process's memory, or the vLLM replicas that computed them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from delta_tree import SegmentId

if TYPE_CHECKING:
    from kvshare.kv.segment import SegmentKV  # imports torch


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """What a plan's segments came to. A tier whose bytes stay where they are hands out none of them."""

    segments: Mapping[SegmentId, SegmentKV]
    missing: frozenset[SegmentId]


class Tier(Protocol):
    """Holds segments, or knows who does. Thread-safe."""

    @property
    def num_bytes(self) -> int: ...

    def __contains__(self, segment_id: object) -> bool: ...

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        """The segments, and which of them are not here or not whole."""

    def drop(self, segment_ids: Iterable[SegmentId]) -> object:
        """Let go of segments; ids that are not here are ignored."""


class EverySegment:
    """A tier that has every segment and no bytes of any: for planning where nothing is computed."""

    num_bytes = 0

    def __contains__(self, segment_id: object) -> bool:
        return True

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        return Fetched({}, frozenset())

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Nothing is held."""
