"""
The `response` arm: a response cache by similarity, what GPTCache does.

The nearest cached prompt of the namespace within `max_distance` answers for this one. Its answer is right
only where the two prompts say the same: equal tokens once those without a letter or digit are left out. Else
it is a false hit, somebody's answer to another question, and counts as no hit. Default distance: GPTCache's
similarity 0.8.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span, TokenIds
from kvshare.replay.arms.base import Arm, Workbench, with_room
from kvshare.replay.requests import Asker, Outcome, TokenizedRequest

_TOKEN_BYTES = 4
_VECTOR_ITEM_BYTES = 4


@dataclass(slots=True)
class _Entry:
    content: bytes  # digest of the tokens that say something
    asker: Asker
    num_bytes: int
    row: int


@dataclass(slots=True)
class _Shelf:
    """
    One namespace: vectors in rows, the entry of each that is cached, and rows that are free again.

    Rows without an entry are prompts that the cache answered: only for telling the distance to the nearest
    one.
    """

    vectors: NDArray[np.float32]
    is_cached: NDArray[np.bool_]
    entries: dict[int, _Entry] = field(default_factory=dict)  # by row
    num_rows: int = 0
    free: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, dimension: int) -> _Shelf:
        return cls(np.zeros((64, dimension), np.float32), np.zeros(64, np.bool_))

    def add(self, vector: NDArray[np.float32]) -> int:
        row = self.free.pop() if self.free else self.num_rows
        if row == self.num_rows:
            self.num_rows += 1
            self.vectors = with_room(self.vectors, self.num_rows)
            self.is_cached = with_room(self.is_cached, self.num_rows)
        self.vectors[row] = vector
        return row

    def nearest(self, vector: NDArray[np.float32]) -> tuple[float | None, float, _Entry | None]:
        """Distance to the nearest prompt, and to the nearest cached one, with its entry."""
        if not self.num_rows:
            return None, 2.0, None
        similarities = self.vectors[: self.num_rows] @ vector
        of_cached = np.where(self.is_cached[: self.num_rows], similarities, -1.0)
        row = int(of_cached.argmax())
        distance, to_cached = 1.0 - float(similarities.max()), 1.0 - float(of_cached[row])
        return max(0.0, distance), max(0.0, to_cached), self.entries.get(row)


class ResponseArm(Arm):
    """Needs meanings. A finite store has the bytes of `capacity_tokens` tokens' KV: room for many answers."""

    family = "response"

    def __init__(
        self, name: str, bench: Workbench, capacity_tokens: int | None = None, *, max_distance: float = 0.2
    ) -> None:
        super().__init__(name, bench, capacity_tokens)
        if bench.meanings is None:
            raise ValueError("a response cache needs embeddings")
        self.max_distance = max_distance
        self._meanings = bench.meanings
        self._shelves: dict[str, _Shelf] = {}
        self._recent: OrderedDict[tuple[str, int], None] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._light = np.fromiter(bench.light_ids, np.int64, len(bench.light_ids))

    @property
    def options(self) -> dict[str, Any]:
        return {"max_distance": self.max_distance}

    def observe(self, request: TokenizedRequest) -> Outcome:
        vector = self._meanings.of(request)
        if vector is None:
            return Outcome(num_stored_bytes=self._num_bytes)
        began = time.perf_counter()
        namespace = request.logged.namespace
        shelf = self._shelves.setdefault(namespace, _Shelf.empty(len(vector)))
        distance, to_cached, nearest = shelf.nearest(vector)
        lookup_s = time.perf_counter() - began
        content = self._content(request.token_ids)
        answered = nearest is not None and to_cached <= self.max_distance
        is_right = answered and nearest is not None and nearest.content == content
        if answered and nearest is not None:
            self._recent.move_to_end((namespace, nearest.row))
            if self.capacity_tokens is None:
                shelf.add(vector)
        else:
            self._store(namespace, shelf, vector, content, request)
        return Outcome(
            hits=(Span(0, request.num_tokens),) if is_right and request.num_tokens else (),
            num_donors=int(answered),
            shifts=(0,) if is_right else (),
            cross_user=answered and nearest is not None and request.logged.asker.is_other(nearest.asker),
            answered=answered,
            false_hit=answered and not is_right,
            lookup_s=lookup_s,
            num_stored_bytes=self._num_bytes,
            distance=distance,
            embedded=True,
        )

    def _content(self, tokens: TokenIds) -> bytes:
        kept = tokens if not len(self._light) else tokens[~np.isin(tokens, self._light)]
        return hashlib.blake2b(kept.astype("<i4").tobytes(), digest_size=16).digest()

    def _store(
        self,
        namespace: str,
        shelf: _Shelf,
        vector: NDArray[np.float32],
        content: bytes,
        request: TokenizedRequest,
    ) -> None:
        row = shelf.add(vector)
        shelf.is_cached[row] = True
        num_tokens = request.num_tokens + len(request.answer_ids)
        num_bytes = _TOKEN_BYTES * num_tokens + _VECTOR_ITEM_BYTES * len(vector)
        shelf.entries[row] = _Entry(content, request.logged.asker, num_bytes, row)
        self._recent[(namespace, row)] = None
        self._num_bytes += num_bytes
        if self.capacity_tokens is not None:
            while self._num_bytes > self.capacity_tokens * self.bench.bytes_per_token:
                self._evict()

    def _evict(self) -> None:
        (namespace, row), _ = self._recent.popitem(last=False)
        shelf = self._shelves[namespace]
        self._num_bytes -= shelf.entries.pop(row).num_bytes
        shelf.vectors[row] = 0.0  # at distance 1 of everything
        shelf.is_cached[row] = False
        shelf.free.append(row)
