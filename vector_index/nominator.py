"""
Nominates candidates: earlier prompts that may be worth aligning with a new one.

1. prefix        the longest known run of leading token blocks               microseconds
2. fingerprint   passages shared after that prefix, at any position          a fraction of a millisecond
3. embedding     near embeddings; only if much of a long prompt is uncovered  tens of milliseconds

Each search and the embedding have their own time limit and circuit breaker. A search of an index in this
process cannot be cancelled: `max_postings` bounds its cost, and after a late search the request makes no
further search. A stage that fails contributes no candidates and returns a `Failure`; it never raises. A
candidate may have left the index meanwhile, so the caller looks up each candidate and never trusts a score.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vector_index.base import Hit, VectorIndex
from vector_index.circuit import Failure
from vector_index.fingerprints import FingerprintFrequencies
from vector_index.indexer import Indexer
from vector_index.nomination import Nomination, NominatorSettings, Ranking
from vector_index.prompt_text import PromptText

_SLOTS_PER_PRINT = 16
_MAX_SEARCHES = 3  # by fingerprints, for one prompt


class Nominator(Indexer):
    """An indexer that also finds candidates among the prompts of one namespace."""

    async def nominate(
        self,
        namespace: str,
        token_ids: NDArray[np.int32],
        prompt_text: PromptText | None,
        *,
        allow_dense: bool,
        allow_passages: bool = True,
    ) -> Nomination:
        """
        Return candidates for a prompt among the stored prompts of its namespace, best first.

        With `prompt_text` None or `allow_dense` False there is no search by embedding. With `allow_passages`
        False there is no search by fingerprints.

        Shapes:  token_ids (T,) int32
        Raises:  nothing but cancellation
        """
        ranking = Ranking(num_tokens=len(token_ids))
        with ranking.timed("prefix"):
            if (hit := self._prefix_table.longest(namespace, token_ids)) is not None:
                ranking.add_prefix(hit)
        if allow_passages:
            with ranking.timed("fingerprint"):
                await self._by_fingerprints(namespace, token_ids, ranking)
        if allow_dense and prompt_text is not None and self._is_worth_embedding(ranking):
            with ranking.timed("embedding"):
                await self._by_embedding(namespace, prompt_text, ranking)
        return ranking.nomination(self.settings.max_candidates)

    async def _by_fingerprints(self, namespace: str, token_ids: NDArray[np.int32], ranking: Ranking) -> None:
        # Only the tokens after the prefix: prompts that share no more than a common system prompt must
        # not displace prompts that share the rest.
        prints = self._fingerprints(namespace, token_ids[ranking.num_prefix_tokens :])
        if not len(prints) or not may_hold(self._index, self._frequencies, prints):
            return
        search = PassageSearch(self._index, self._frequencies, self.settings, namespace, prints)
        timeout_s = self.settings.search_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        failed = await self.circuits["fingerprint"].attempt(
            lambda: search.run(deadline=deadline), timeout_s=timeout_s
        )
        if failed is not None:
            ranking.failures.append(failed)
        prefix, ranking.covered_rest = ranking.prefix, search.covered
        for hit in search.ranked():
            shares = prefix and self._prefix_table.shares(namespace, hit.prompt_id, prefix)
            ranking.add_passages(hit, shares_prefix=bool(shares))

    async def _by_embedding(self, namespace: str, prompt_text: PromptText, ranking: Ranking) -> None:
        vectors = await self._embed("embedder", [prompt_text], timeout_s=self.settings.embed_timeout_s)
        if isinstance(vectors, Failure):
            ranking.failures.append(vectors)
            return
        (vector,) = vectors
        if vector is None:
            return
        limit, max_distance = self.settings.max_candidates, self.settings.max_distance
        hits = await self.circuits["embedding"].attempt(
            lambda: self._index.search_embedding(namespace, vector, limit, max_distance),
            timeout_s=self.settings.search_timeout_s,
        )
        if isinstance(hits, Failure):
            ranking.failures.append(hits)
        else:
            ranking.add_embeddings(hits)

    def _is_worth_embedding(self, ranking: Ranking) -> bool:
        return (
            self._embedder is not None
            and ranking.num_tokens >= self.settings.dense_min_tokens
            and ranking.uncovered >= self.settings.dense_min_uncovered
        )


def may_hold(index: VectorIndex, frequencies: FingerprintFrequencies, prints: NDArray[np.uint32]) -> bool:
    """Return whether a stored prompt may hold one of these fingerprints; if not, a search finds nothing."""
    return not index.is_own or bool(frequencies.are_held(prints).any())


class PassageSearch:
    """
    Finds a few donors whose shared passages together cover as much of the prompt as possible.

    The prompts that share most with the new prompt are often alike: they all have the popular document. They
    would displace a donor that shares a rare passage and little else. So fingerprints that the hits leave
    uncovered are searched again, and hits are sorted by greedy set cover. There are up to three queries, each
    within the budget of postings. If a query fails, the results of the queries before it remain.

    Shapes:  prints (F,) uint32, sorted
    """

    def __init__(
        self,
        index: VectorIndex,
        frequencies: FingerprintFrequencies,
        settings: NominatorSettings,
        namespace: str,
        prints: NDArray[np.uint32],
    ) -> None:
        self._index = index
        self._frequencies = frequencies
        self._settings = settings
        self._namespace = namespace
        self._prints = prints
        self._counts: dict[int, float] = {}  # per donor: how many of the prints it holds
        self._places = _PlaceTable(prints)
        self._holds = np.packbits(np.zeros((0, len(prints)), dtype=np.bool_), axis=1)  # (donors, F bits)

    async def run(self, *, deadline: float) -> None:
        """
        Query until little is left uncovered, at most three times, and not after the deadline.

        Units:   deadline in seconds of the event loop's clock
        Raises:  IndexUnavailableError as the index does
        """
        left = self._prints
        for _ in range(_MAX_SEARCHES):
            asked = self._frequencies.rarest(
                left,
                max_postings=self._settings.max_postings,
                min_asked=self._settings.min_asked,
                max_asked=self._settings.max_asked,
            )
            limit = self._settings.max_candidates
            found = await self._index.search_fingerprints(self._namespace, asked, limit)
            new = [hit for hit in found if hit.prompt_id not in self._counts]
            self._add(new)
            left, enough = self._prints[~self._is_covered()], self._settings.min_asked
            if not new:  # the rare fingerprints found no donor: query the others
                left, enough = np.setdiff1d(left, asked, assume_unique=True), 1
            if (
                len(left) < enough
                or not (new or may_hold(self._index, self._frequencies, left))
                or asyncio.get_running_loop().time() >= deadline
            ):
                break

    @property
    def covered(self) -> float:
        """Return the share of the prints that the donors found so far cover together."""
        together = float(self._is_covered().mean())
        return max(together, *(self._share(count) for count in self._counts.values()), 0.0)

    def ranked(self) -> list[Hit]:
        """
        Return the donors found so far. Each is the donor that adds most prints to the donors before it.

        The score of a donor is the share of the prints that it holds, 0 to 1.
        """
        found = list(self._counts.items())
        order = _cover_order(self._holds, list(self._counts.values()))
        return [Hit(found[i][0], self._share(found[i][1])) for i in order]

    def _share(self, count: float) -> float:
        return min(1.0, count / len(self._prints))

    def _add(self, hits: Sequence[Hit]) -> None:
        rows = np.zeros((len(hits), len(self._prints)), dtype=np.bool_)
        for row, hit in zip(rows, hits, strict=True):
            held = self._frequencies.held(self._namespace, hit.prompt_id)
            if held is not None:
                row[self._places.of(held)] = True
            # For a prompt of another process, the index knows how many prints it shares, but not which.
            self._counts[hit.prompt_id] = hit.score if held is None else float(np.count_nonzero(row))
        self._holds = np.concatenate([self._holds, np.packbits(rows, axis=1)])

    def _is_covered(self) -> NDArray[np.bool_]:
        """Return for each print whether any of the donors holds it, (F,)."""
        together = np.bitwise_or.reduce(self._holds, axis=0)
        return np.unpackbits(together, count=len(self._prints)).astype(np.bool_)


class _PlaceTable:
    """
    Finds the index of a fingerprint among sorted ones by a hash table, in a third of a bisection's time.

    Shapes:  prints (F,) uint32, at least one, sorted and unique
    """

    def __init__(self, prints: NDArray[np.uint32]) -> None:
        self._prints = prints
        self._mask = np.uint32((1 << (_SLOTS_PER_PRINT * len(prints)).bit_length()) - 1)
        slots, places = prints & self._mask, np.arange(len(prints), dtype=np.int32)
        self._table = np.zeros(int(self._mask) + 1, dtype=np.int32)
        self._table[slots] = places
        self._lost = np.flatnonzero(self._table[slots] != places)  # another print has their slot

    def of(self, held: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the indices of the prints that are also in `held`, (N,). `held` is sorted."""
        places = self._table.take(held & self._mask)
        places = places[self._prints.take(places) == held]
        lost = self._prints[self._lost]
        is_held = np.searchsorted(held, lost, side="right") > np.searchsorted(held, lost)
        return np.concatenate([places, self._lost[is_held]])


def _cover_order(holds: NDArray[np.uint8], counts: Sequence[float]) -> list[int]:
    """
    Return the indices of the donors by greedy set cover; donors that add nothing follow, sorted by count.

    Shapes:  holds (donors, F / 8), bits
    """
    rest = sorted(range(len(counts)), key=lambda i: -counts[i])
    uncovered = np.full(holds.shape[1], 0xFF, dtype=np.uint8)
    order = []
    while rest:
        gains = np.bitwise_count(holds[rest] & uncovered).sum(axis=1)
        best = int(gains.argmax())  # of equal gains the first, whose donor shares most
        if gains[best] == 0:
            break
        uncovered &= ~holds[rest[best]]
        order.append(rest.pop(best))
    return order + rest
