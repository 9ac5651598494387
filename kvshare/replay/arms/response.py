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

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span, TokenIds
from kvshare.replay.arms.base import Arm, Vector, with_room
from kvshare.replay.requests import Asker, Outcome, TokenizedRequest

_ITEM_BYTES = 4  # of a token id, and of a number of a vector


@dataclass(frozen=True, slots=True)
class _Entry:
    content: bytes  # digest of the tokens that say something
    asker: Asker
    num_bytes: int


@dataclass(slots=True)
class _Shelf:
    """
    One namespace: vectors in rows, which of them have an entry, and rows that are free again.

    Rows without an entry are prompts that the cache answered: only for telling the distance to the nearest
    one.
    """

    vectors: Vector
    is_cached: NDArray[np.bool_]
    num_rows: int = 0
    free: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, dimension: int) -> _Shelf:
        return cls(np.zeros((64, dimension), np.float32), np.zeros(64, np.bool_))

    def add(self, vector: Vector, *, is_cached: bool) -> int:
        row = self.free.pop() if self.free else self.num_rows
        if row == self.num_rows:
            self.num_rows += 1
            self.vectors = with_room(self.vectors, self.num_rows)
            self.is_cached = with_room(self.is_cached, self.num_rows)
        self.vectors[row], self.is_cached[row] = vector, is_cached
        return row

    def remove(self, row: int) -> None:
        self.vectors[row], self.is_cached[row] = 0.0, False  # at distance 1 of everything
        self.free.append(row)

    def nearest(self, vector: Vector) -> tuple[float | None, float, int]:
        """Distance to the nearest prompt, and to the nearest cached one, with its row."""
        if not self.num_rows:
            return None, 2.0, 0
        similarities = self.vectors[: self.num_rows] @ vector
        of_cached = np.where(self.is_cached[: self.num_rows], similarities, -1.0)
        row = int(of_cached.argmax())
        distance, to_cached = 1.0 - float(similarities.max()), 1.0 - float(of_cached[row])
        return max(0.0, distance), max(0.0, to_cached), row


@dataclass(eq=False, kw_only=True)
class ResponseArm(Arm):
    """Needs meanings. A finite store has the bytes of `capacity_tokens` tokens' KV: room for many answers."""

    family = "response"

    max_distance: float = 0.2

    def __post_init__(self) -> None:
        if self.bench.meanings is None:
            raise ValueError("a response cache needs embeddings")
        self._meanings = self.bench.meanings
        self._shelves: dict[str, _Shelf] = {}
        self._entries: OrderedDict[tuple[str, int], _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._light = np.array(sorted(self.bench.light_ids), np.int64)

    def observe(self, request: TokenizedRequest) -> Outcome:
        vector = self._meanings.of(request)
        if vector is None:
            return Outcome(num_stored_bytes=self._num_bytes)
        began = time.perf_counter()
        namespace, asker = request.logged.namespace, request.logged.asker
        shelf = self._shelves.setdefault(namespace, _Shelf.empty(len(vector)))
        distance, to_cached, row = shelf.nearest(vector)
        lookup_s = time.perf_counter() - began
        content = self._content(request.token_ids)
        answer = self._entries.get((namespace, row)) if to_cached <= self.max_distance else None
        if answer is None:
            num_items = request.num_tokens + len(request.answer_ids) + len(vector)
            self._store(namespace, vector, _Entry(content, asker, _ITEM_BYTES * num_items))
        else:
            self._entries.move_to_end((namespace, row))
            if self.capacity_tokens is None:
                shelf.add(vector, is_cached=False)
        is_right = answer is not None and answer.content == content
        return Outcome(
            hits=(Span(0, request.num_tokens),) if is_right and request.num_tokens else (),
            num_donors=int(answer is not None),
            shifts=(0,) if is_right else (),
            cross_user=answer is not None and asker.is_other(answer.asker),
            false_hit=answer is not None and not is_right,
            lookup_s=lookup_s,
            num_stored_bytes=self._num_bytes,
            distance=distance,
            answered=answer is not None,
            embedded=True,
        )

    def _content(self, tokens: TokenIds) -> bytes:
        kept = tokens if not len(self._light) else tokens[~np.isin(tokens, self._light)]
        return hashlib.blake2b(kept.astype("<i4").tobytes(), digest_size=16).digest()

    def _store(self, namespace: str, vector: Vector, entry: _Entry) -> None:
        self._entries[namespace, self._shelves[namespace].add(vector, is_cached=True)] = entry
        self._num_bytes += entry.num_bytes
        if self.capacity_tokens is not None:
            while self._num_bytes > self.capacity_tokens * self.bench.bytes_per_token:
                (oldest, row), evicted = self._entries.popitem(last=False)
                self._num_bytes -= evicted.num_bytes
                self._shelves[oldest].remove(row)
