"""
Nominates candidates: earlier prompts that may be worth aligning with a new one.

1. prefix        the longest known run of leading token blocks               microseconds
2. fingerprint   passages shared after that prefix, at any position          a fraction of a millisecond
3. meaning       near embeddings; only if much of a long prompt is uncovered  tens of milliseconds

The searches and the embedding have a time limit and a circuit breaker each. A search of an index in this
process cannot be cancelled: `max_postings` bounds its cost, and after a late search the request makes no
further one. A stage that fails contributes no candidates and returns a `Failure`; it never raises. A
candidate may have left the index meanwhile, so the caller looks each one up and never trusts a score.
"""

import asyncio

import numpy as np
from numpy.typing import NDArray

from vector_index.circuit import Failure
from vector_index.indexer import Indexer
from vector_index.nomination import Nomination
from vector_index.passages import PassageSearch
from vector_index.prompt_text import PromptText
from vector_index.ranking import Ranking


class Nominator(Indexer):
    """An indexer that also finds candidates among the prompts of one namespace."""

    async def nominate(
        self,
        namespace: str,
        token_ids: NDArray[np.int32],
        prompt_text: PromptText | None,
        *,
        allow_dense: bool,
    ) -> Nomination:
        """
        Candidates for a prompt among the stored prompts of its namespace, best first.

        With `prompt_text` None or `allow_dense` False there is no search by embedding.

        Shapes:  token_ids (T,) int32
        Raises:  nothing but cancellation
        """
        ranking = Ranking(num_tokens=len(token_ids))
        with ranking.timed("prefix"):
            if (hit := self._prefix_table.longest(namespace, token_ids)) is not None:
                ranking.add_prefix(hit)
        with ranking.timed("fingerprint"):
            await self._by_fingerprints(namespace, token_ids, ranking)
        if allow_dense and prompt_text is not None and self._is_worth_embedding(ranking):
            with ranking.timed("meaning"):
                await self._by_embedding(namespace, prompt_text, ranking)
        return ranking.nomination(self.settings.max_candidates)

    async def _by_fingerprints(self, namespace: str, token_ids: NDArray[np.int32], ranking: Ranking) -> None:
        # Only the tokens after the prefix: prompts that share no more than a common system prompt must
        # not displace prompts that share the rest.
        prints = self._fingerprints(namespace, token_ids[ranking.num_prefix_tokens :])
        if not len(prints):
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
        vectors = await self._embed("embedding", [prompt_text], timeout_s=self.settings.embed_timeout_s)
        if isinstance(vectors, Failure):
            ranking.failures.append(vectors)
            return
        (vector,) = vectors
        if vector is None:
            return
        limit, max_distance = self.settings.max_candidates, self.settings.max_distance
        hits = await self.circuits["meaning"].attempt(
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
