"""Which segments of a stack are where: for the budgets of a keeper, and to predict how long reads take."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from delta_tree import SegmentId


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A `Budget` for one part of a stack. `held`: counts its bytes; `holds`: whether a segment is in it."""

    max_bytes: int
    held: Callable[[], int]
    holds: Callable[[SegmentId], bool]

    @property
    def num_bytes(self) -> int:
        return self.held()

    def __contains__(self, segment_id: SegmentId) -> bool:
        return self.holds(segment_id)


class OnDisk(Container[SegmentId]):
    """The segments of a stack that are on disk or in a shared store, and not in memory."""

    def __init__(self, holds: Callable[[object], bool]) -> None:
        self._holds = holds

    def __contains__(self, segment_id: object) -> bool:
        return self._holds(segment_id)
