"""
Which earlier prompts may be worth aligning with this one: nomination only, it decides nothing.

1. prefix        the longest known run of leading token blocks          microseconds
2. fingerprint   passages of what the prefix leaves, wherever they are  a fraction of a millisecond
3. meaning       only where much is still open and the prompt is long   tens of milliseconds

The searches and the embedding have a time limit and a circuit breaker each. An index in this process
cannot be broken off: what bounds one search of it is `max_postings`, a late one is the last of its
request, and after several in a row there are none for a while. Whatever fails costs candidates and
leaves a `Failure`, never an exception. A candidate may have been forgotten meanwhile, so the
caller looks each one up; it never trusts a score.
"""

import asyncio

import numpy as np
from numpy.typing import NDArray

from vector_index.circuit import Failure
from vector_index.indexer import Indexer
from vector_index.nomination import Nomination
from vector_index.passages import PassageSearch
from vector_index.prompt_text import PromptText
from vector_index.tally import Tally


class Nominator(Indexer):
    """An indexer that also finds candidates in one namespace of what it has indexed."""

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

        `prompt_text` None or `allow_dense` False leave out the search by meaning.

        Shapes:  token_ids (T,) int32
        Raises:  nothing but cancellation
        """
        tally = Tally(num_tokens=len(token_ids))
        with tally.timed("prefix"):
            if (hit := self._prefix_table.longest(namespace, token_ids)) is not None:
                tally.add_prefix(hit)
        with tally.timed("fingerprint"):
            await self._by_fingerprints(namespace, token_ids, tally)
        if allow_dense and prompt_text is not None and self._is_worth_embedding(tally):
            with tally.timed("meaning"):
                await self._by_meaning(namespace, prompt_text, tally)
        return tally.nomination(self.settings.max_candidates)

    async def _by_fingerprints(self, namespace: str, token_ids: NDArray[np.int32], tally: Tally) -> None:
        # Only of what the prefix leaves: a system prompt that everybody starts with is neither
        # searched for nor able to crowd out those who share the rest.
        prints = self._fingerprints(namespace, token_ids[tally.num_prefix_tokens :])
        if not len(prints):
            return
        search = PassageSearch(self._index, self._frequencies, self.settings, namespace, prints)
        timeout_s = self.settings.search_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        failed = await self.circuits["fingerprint"].attempt(
            lambda: search.run(deadline=deadline), timeout_s=timeout_s
        )
        if failed is not None:
            tally.failures.append(failed)
        prefix, tally.covered_rest = tally.prefix, search.covered
        for hit in search.ranked():
            shares = prefix and self._prefix_table.shares(namespace, hit.prompt_id, prefix)
            tally.add_passages(hit, shares_prefix=bool(shares))

    async def _by_meaning(self, namespace: str, prompt_text: PromptText, tally: Tally) -> None:
        vectors = await self._embed("embedding", [prompt_text], timeout_s=self.settings.embed_timeout_s)
        if isinstance(vectors, Failure):
            tally.failures.append(vectors)
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
            tally.failures.append(hits)
        else:
            tally.add_meaning(hits)

    def _is_worth_embedding(self, tally: Tally) -> bool:
        return (
            self._embedder is not None
            and tally.num_tokens >= self.settings.dense_min_tokens
            and tally.uncovered >= self.settings.dense_min_uncovered
        )
