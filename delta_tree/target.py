"""
A prompt that is composed, perhaps several times, and what its compositions have in common.

Planning composes a prompt with all candidates, and often again with some of them or with their exact parts.
Hashes, shared k-grams and alignments of a candidate are the same each time, so they are found once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from delta_tree.donors import Content, content_of
from delta_tree.edits import Match
from delta_tree.kgrams import Hashes, Ids, Places, Sieve, quick_hashes
from delta_tree.node import Node, Segment, SegmentId
from delta_tree.spans import TokenIds, token_ids


@dataclass(slots=True, eq=False)
class Look:
    """A candidate's visible tokens, and which of them the prompt has after some prefix."""

    visible: Ids  # held, so that no other array gets its address
    hashes: Hashes
    places: Places  # of its k-grams that may occur after that prefix
    shares: bool = False  # whether one of these k-grams occurs in the prompt, token for token
    is_new: bool = True  # whether `shares` is still to be computed
    in_order: list[Match] | None = None  # the runs of an alignment; None: not aligned yet


class Target:
    """Lives as long as one plan is made, in one thread. Shapes: tokens (T,) int32."""

    def __init__(self, tokens: TokenIds, *, min_run: int) -> None:
        """Raises ValueError for a `min_run` below 1."""
        if min_run < 1:
            raise ValueError(f"min_run must be at least 1, got {min_run}")
        self.tokens, self.min_run = token_ids(tokens), min_run
        self._contents: dict[tuple[int, int, bool], tuple[Node, Content]] = {}  # by `id()` of the node object
        self._looks: dict[tuple[int, int, bool], Look] = {}  # by the address of `visible`

    @cached_property
    def hashes(self) -> Hashes:
        """Return the hashes of all k-grams of the prompt; not needed if only its exact prefix is copied."""
        return quick_hashes(self.tokens, self.min_run)

    @cached_property
    def sorted_hashes(self) -> Hashes:
        return np.sort(self.hashes)

    @cached_property
    def anywhere(self) -> Sieve:
        """Return the sieve of all k-grams of the prompt. Only `DonorReason`s of unused candidates need it."""
        return Sieve(self.hashes)

    def content(
        self, node: Node, segment_of: Callable[[SegmentId], Segment], *, max_generation: int, may_move: bool
    ) -> Content:
        """Return what of a candidate may be copied; later calls return the result of the first one."""
        key = (id(node), max_generation, may_move)
        if key not in self._contents:  # the node is held, so that no other one gets its id
            self._contents[key] = (
                node,
                content_of(node, self.tokens, segment_of, max_generation=max_generation, may_move=may_move),
            )
        return self._contents[key][1]

    def look(self, visible: Ids, start: int, *, may_move: bool) -> Look | None:
        """
        Return what an earlier composition found for these tokens and the target from `start` on, if any.

        If that composition looked at more tokens, which begin with these, `shares` must be computed again.
        """
        found = self._looks.get((_address(visible), start, may_move))
        if found is None or len(found.visible) == len(visible):
            return found
        if len(found.visible) < len(visible):
            return None
        size = max(len(visible) - self.min_run + 1, 0)
        places = found.places[: found.places.searchsorted(size)]
        return Look(visible, found.hashes[:size], places, is_new=True)

    def keep(self, look: Look, start: int, *, may_move: bool) -> None:
        """Keep a look for a later composition."""
        look.is_new = False
        self._looks[_address(look.visible), start, may_move] = look


def _address(tokens: Ids) -> int:
    address: int = tokens.__array_interface__["data"][0]
    return address
