"""
A prompt that is composed, perhaps several times, and what its compositions have in common.

Planning composes a prompt with all candidates, and often again with some of them or with their exact parts.
Hashes, shared k-grams and alignments of a candidate are the same each time, so they are found once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from delta_tree.donors import Content, content_of
from delta_tree.edits import Match
from delta_tree.kgrams import CandidateKGrams, Hashes, Ids, Places, Sieve, hashes_of_all, quick_hashes
from delta_tree.node import Node, Segment, SegmentId
from delta_tree.runs import Pair
from delta_tree.spans import TokenIds, token_ids

_T = TypeVar("_T")
_NOTHING: tuple[Ids, Hashes] = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint32)


@dataclass(slots=True, eq=False)
class Look:
    """A candidate's visible tokens, and which of them the prompt has after some prefix."""

    visible: Ids  # held, so that no other array gets its address
    hashes: Hashes
    places: Places  # of its k-grams that may occur after that prefix
    shares: bool = False  # whether one of these k-grams occurs in the prompt, token for token
    in_order: list[Match] | None = None  # the runs of an alignment; None: not aligned yet


class Target:
    """Lives as long as one plan is made, in one thread. Shapes: tokens (T,) int32."""

    def __init__(self, tokens: TokenIds, *, min_run: int) -> None:
        """Raises ValueError for a `min_run` below 1."""
        if min_run < 1:
            raise ValueError(f"min_run must be at least 1, got {min_run}")
        self.tokens, self.min_run = token_ids(tokens), min_run
        self._contents: dict[tuple[int, int, bool], tuple[Node, Content]] = {}  # by `id()` of the node object
        self._sieves: dict[int, Sieve] = {}  # by the position from which on they have all k-grams
        self._hashed: dict[int, tuple[Ids, Hashes]] = {}  # by the address of the tokens, which are held
        self._found: dict[tuple[Any, ...], tuple[object, Any]] = {}  # by `once`
        self._looks: dict[tuple[int, int, bool], Look] = {}  # by the address of `visible`

    @cached_property
    def hashes(self) -> Hashes:
        """Return the hashes of all k-grams of the prompt; not needed if only its exact prefix is copied."""
        return quick_hashes(self.tokens, self.min_run)

    def sieve_from(self, start: int) -> Sieve:
        """Return the sieve of the k-grams from a position on."""
        if start not in self._sieves:
            self._sieves[start] = Sieve(self.hashes[start:])
        return self._sieves[start]

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

    def once(self, key: tuple[Any, ...], held: object, find: Callable[[], _T]) -> _T:
        """Return what was found for this key. `held`: objects whose `id()` is in the key."""
        if key not in self._found:
            self._found[key] = held, find()
        found: _T = self._found[key][1]
        return found

    def hashes_of(self, prompts: Sequence[Ids]) -> list[Hashes]:
        """Return the hashes of the k-grams of candidates; those of one and of its beginning are made once."""
        missing = [ids for ids in prompts if len(self._hashed.get(_address(ids), _NOTHING)[0]) < len(ids)]
        missing.sort(key=len)  # of a prompt and its beginning the prompt is kept
        for ids, hashes in zip(missing, hashes_of_all(missing, self.min_run), strict=True):
            self._hashed[_address(ids)] = ids, hashes
        sizes = (max(len(ids) - self.min_run + 1, 0) for ids in prompts)
        return [self._hashed[_address(ids)][1][:size] for ids, size in zip(prompts, sizes, strict=True)]

    def looks(self, prompts: Sequence[Ids], start: int, *, may_move: bool) -> list[Look]:
        """
        Return what the target has of each of these from `start` on, or what an earlier composition found.

        `prompts`: the visible tokens of candidates
        """
        looks = {number: self._known(visible, start, may_move) for number, visible in enumerate(prompts)}
        new = [number for number, look in looks.items() if look is None]
        hashes = self.hashes_of([prompts[number] for number in new])
        passing = [np.empty(0, dtype=np.int64)] * len(new)
        if new and len(self.tokens) - start >= self.min_run:
            passing = CandidateKGrams(hashes).narrow(self.sieve_from(start))
        for number, own, places in zip(new, hashes, passing, strict=True):
            looks[number] = look = Look(prompts[number], own, places)
            look.shares = self._shares(look, start)
            self._looks[_address(look.visible), start, may_move] = look
        return [look for look in looks.values() if look is not None]

    def may_have(self, prompts: Sequence[Ids]) -> npt.NDArray[np.bool_]:
        """
        (T,) whether a run of one of these prompts may cover a position; of all others it is certain that
        none does. Shapes: each of `prompts` (S,)
        """
        places = Sieve(np.concatenate(self.hashes_of(prompts))).passing(self.hashes)
        edges = np.zeros(len(self.tokens) + 1, dtype=np.int32)
        edges[places] = 1
        edges[places + self.min_run] -= 1
        return np.cumsum(edges[:-1]) > 0

    def has_any_of(self, look: Look) -> bool:
        """Return whether the target has, anywhere, a k-gram of these tokens."""
        places = self.anywhere.passing(look.hashes)
        return self.pair(look.visible, look.hashes).has_common_run(places, lambda: self.sorted_hashes)

    def pair(self, visible: Ids, hashes: Hashes) -> Pair:
        return Pair(visible, self.tokens, hashes, self.hashes, self.min_run)

    def _known(self, visible: Ids, start: int, may_move: bool) -> Look | None:
        """Return an earlier look at these tokens, or the beginning of one at more that begin with these."""
        kept = self._looks.get((_address(visible), start, may_move))
        if kept is None or len(kept.visible) == len(visible):
            return kept
        if len(kept.visible) < len(visible):
            return None
        size = max(len(visible) - self.min_run + 1, 0)
        look = Look(visible, kept.hashes[:size], kept.places[: kept.places.searchsorted(size)])
        look.shares = self._shares(look, start)
        return look

    def _shares(self, look: Look, start: int) -> bool:
        pair = self.pair(look.visible, look.hashes)
        return pair.has_common_run(look.places, lambda: self.sorted_hashes, start=start)


def _address(tokens: Ids) -> int:
    address: int = tokens.__array_interface__["data"][0]
    return address
