"""
The `chunks` arm: an exact prefix, and whole chunks of 256 tokens wherever they stand, as LMCache's blend
reuses.

Follows LMCache's open blend server (v1/multiprocess/modules/blend): stored prompts are cut every 256 tokens,
the first chunk left to the prefix cache; a prompt is searched at every token offset, each stored chunk serves
once, overlaps go to the leftmost. One changed token loses its whole chunk. Unlike LMCache, tokens are
compared. A finite store is the chunks' alone: the engine's own prefix cache of the same size comes on top.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from delta_tree import Span, TokenIds, merge
from delta_tree.kgrams import kgram_hashes
from kvshare.replay.arms.base import Arm, Workbench, stored_tokens
from kvshare.replay.arms.prefix import PrefixArm
from kvshare.replay.requests import Asker, Outcome, TokenizedRequest, any_of


@dataclass(frozen=True, slots=True)
class _Chunk:
    content: bytes
    start: int  # where it stood
    asker: Asker


@dataclass(frozen=True, slots=True)
class _Match:
    at: int
    chunk: _Chunk


class ChunksArm(Arm):
    """Prefix blocks of 16, then chunks of `chunk_size` anywhere."""

    family = "chunks"

    def __init__(
        self,
        name: str,
        bench: Workbench,
        capacity_tokens: int | None = None,
        *,
        chunk_size: int = 256,
        block_size: int = 16,
    ) -> None:
        super().__init__(name, bench, capacity_tokens)
        self.chunk_size = chunk_size
        self._prefix = PrefixArm(name, bench, capacity_tokens, block_size=block_size)
        self._chunks: OrderedDict[tuple[str, int], _Chunk] = OrderedDict()  # least recently used first

    @property
    def options(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, **self._prefix.options}

    def observe(self, request: TokenizedRequest) -> Outcome:
        exact = self._prefix.observe(request)
        began = time.perf_counter()
        matches = self._find(request, exact.num_hit)
        lookup_s = exact.lookup_s + time.perf_counter() - began
        self._store(request)
        # The last token is always computed: the answer starts from it.
        last = max(0, request.num_tokens - 1)
        found = [Span(match.at, min(match.at + self.chunk_size, last)) for match in matches]
        asker = request.logged.asker
        return replace(
            exact,
            hits=merge([*exact.hits, *found]),
            num_donors=exact.num_donors + len({(m.chunk.asker, m.chunk.start - m.at) for m in matches}),
            shifts=(*exact.shifts, *(match.at - match.chunk.start for match in matches)),
            cross_user=any_of([exact.cross_user, *(asker.is_other(match.chunk.asker) for match in matches)]),
            lookup_s=lookup_s,
            num_stored_bytes=exact.num_stored_bytes
            + len(self._chunks) * self.chunk_size * self.bench.bytes_per_token,
        )

    def _find(self, request: TokenizedRequest, start: int) -> list[_Match]:
        """Chunks behind the prefix, from left to right, without overlaps."""
        tokens, size = request.token_ids, self.chunk_size
        namespace, chunks = request.logged.namespace, self._chunks
        used: set[int] = set()
        matches: list[_Match] = []
        end = start
        for at, code in enumerate(kgram_hashes(tokens[start:], size).tolist(), start=start):
            if at < end or code in used:
                continue
            chunk = chunks.get((namespace, code))
            if chunk is None or chunk.content != _content(tokens[at : at + size]):
                continue
            matches.append(_Match(at, chunk))
            used.add(code)
            end = at + size
            chunks.move_to_end((namespace, code))
        return matches

    def _store(self, request: TokenizedRequest) -> None:
        tokens, size = stored_tokens(request), self.chunk_size
        for start in range(size, len(tokens) - size + 1, size):
            part = tokens[start : start + size]
            key = (request.logged.namespace, int(kgram_hashes(part, size)[0]))
            if key not in self._chunks:
                self._chunks[key] = _Chunk(_content(part), start, request.logged.asker)
            self._chunks.move_to_end(key)
        if self.capacity_tokens is not None:
            while len(self._chunks) * size > self.capacity_tokens:
                self._chunks.popitem(last=False)


def _content(tokens: TokenIds) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()
