"""
The `response` policy: a response cache by similarity, as GPTCache works.

The most similar cached prompt of the namespace within `max_distance` answers this one (default: GPTCache's
similarity of 0.8). The answer is right only if both prompts say the same: equal tokens once those without a
letter or digit are left out. Otherwise it is a false hit, an answer to another question, and reuses nothing.
"""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from delta_tree import Span
from kvshare.logs.requests import Requester
from kvshare.replay.policies.base import CachePolicy, Vector, with_room
from kvshare.replay.requests import Outcome, TokenizedRequest

_ITEM_BYTES = 4  # of a token id, and of a number of a vector


class _Entry(NamedTuple):
    content: bytes  # digest of the tokens with a letter or digit
    requester: Requester
    num_bytes: int


class _NamespaceIndex:
    """
    One namespace's vectors in rows; rows of evicted entries are used again.

    Rows without an entry are prompts that the cache answered: they only count for the nearest distance.
    """

    def __init__(self, dimension: int) -> None:
        self._vectors = np.zeros((64, dimension), np.float32)
        self._is_cached = np.zeros(64, np.bool_)
        self._num_rows = 0
        self._free: list[int] = []

    def add(self, vector: Vector, *, is_cached: bool) -> int:
        row = self._free.pop() if self._free else self._num_rows
        if row == self._num_rows:
            self._num_rows += 1
            self._vectors = with_room(self._vectors, self._num_rows)
            self._is_cached = with_room(self._is_cached, self._num_rows)
        self._vectors[row], self._is_cached[row] = vector, is_cached
        return row

    def remove(self, row: int) -> None:
        self._vectors[row], self._is_cached[row] = 0.0, False  # at distance 1 of everything
        self._free.append(row)

    def nearest(self, vector: Vector) -> tuple[float | None, float, int]:
        """Distance to the nearest prompt, and to the nearest cached one, with its row."""
        if not self._num_rows:
            return None, 2.0, 0
        similarities = self._vectors[: self._num_rows] @ vector
        of_cached = np.where(self._is_cached[: self._num_rows], similarities, -1.0)
        row = int(of_cached.argmax())
        distance, to_cached = 1.0 - float(similarities.max()), 1.0 - float(of_cached[row])
        return max(0.0, distance), max(0.0, to_cached), row


@dataclass(eq=False, kw_only=True)
class ResponsePolicy(CachePolicy):
    """Needs embeddings. A finite store holds answers of as many bytes as KV of `capacity_tokens` tokens."""

    family = "response"

    max_distance: float = 0.2

    def __post_init__(self) -> None:
        if self.context.embeddings is None:
            raise ValueError("a response cache needs embeddings")
        self._embeddings = self.context.embeddings
        self._indexes: dict[str, _NamespaceIndex] = {}
        self._entries: OrderedDict[tuple[str, int], _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._punctuation = np.array(sorted(self.context.punctuation_ids), np.int64)

    def observe(self, request: TokenizedRequest) -> Outcome:
        vector = self._embeddings.of(request)
        if vector is None:
            return Outcome(num_stored_bytes=self._num_bytes)
        began = time.perf_counter()
        namespace, requester = request.logged.namespace, request.logged.requester
        index = self._indexes.setdefault(namespace, _NamespaceIndex(len(vector)))
        distance, to_cached, row = index.nearest(vector)
        lookup_s = time.perf_counter() - began
        words = request.token_ids[~np.isin(request.token_ids, self._punctuation)]
        content = hashlib.blake2b(words.astype("<i4").tobytes(), digest_size=16).digest()
        answer = self._entries.get((namespace, row)) if to_cached <= self.max_distance else None
        if answer is None:
            num_items = request.num_tokens + len(request.answer_ids) + len(vector)
            self._store(namespace, vector, _Entry(content, requester, _ITEM_BYTES * num_items))
        else:
            self._entries.move_to_end((namespace, row))
            if self.capacity_tokens is None:
                index.add(vector, is_cached=False)
        is_right = answer is not None and answer.content == content
        return Outcome(
            hits=(Span(0, request.num_tokens),) if is_right and request.num_tokens else (),
            num_donors=int(answer is not None),
            shifts=(0,) if is_right else (),
            cross_user=answer is not None and requester.is_other(answer.requester),
            false_hit=answer is not None and not is_right,
            lookup_s=lookup_s,
            num_stored_bytes=self._num_bytes,
            distance=distance,
            answered=answer is not None,
            embedded=True,
        )

    def _store(self, namespace: str, vector: Vector, entry: _Entry) -> None:
        self._entries[namespace, self._indexes[namespace].add(vector, is_cached=True)] = entry
        self._num_bytes += entry.num_bytes
        if self.capacity_tokens is not None:
            while self._num_bytes > self.capacity_tokens * self.context.bytes_per_token:
                (oldest, row), evicted = self._entries.popitem(last=False)
                self._num_bytes -= evicted.num_bytes
                self._indexes[oldest].remove(row)
