"""
Which earlier prompts may be worth aligning with this one: nomination only, it decides nothing.

1. prefix        the longest known run of leading token blocks          microseconds
2. fingerprint   passages of what the prefix leaves, wherever they are  a fraction of a millisecond
3. meaning       only where much is still open and the prompt is long   tens of milliseconds

The searches and the embedding have a time limit and a circuit breaker each. An index in this process
cannot be broken off: what bounds one search of it is `max_postings`, a late one is the last of its
request, and after several in a row there are none for a while. Whatever fails costs candidates and
leaves a `Failure`, never an exception. A candidate may have been forgotten
meanwhile, so the caller looks each one up; it never trusts a score.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from vector_index.base import VectorIndex
from vector_index.circuit import Circuit, Failure
from vector_index.frequencies import FingerprintFrequencies
from vector_index.indexer import Indexer
from vector_index.nomination import Nomination, NominatorSettings, PromptRecord
from vector_index.passages import PassageSearch
from vector_index.prefix_table import PrefixTable
from vector_index.prompt_text import PromptText, TextEmbedder, embed_prompts
from vector_index.tally import Tally

log = logging.getLogger(__name__)


class Nominator:
    """
    Finds candidates in one namespace and keeps the index up to date. Used from one event loop.

    The index belongs to the caller, who opens and closes it. The prefix table and the fingerprint
    frequencies are this process's: of prompts that others write only the index knows.
    """

    def __init__(
        self,
        index: VectorIndex,
        embedder: TextEmbedder | None = None,
        settings: NominatorSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or NominatorSettings()
        self._index = index
        self._prefix_table = PrefixTable(self.settings.block_size)
        self._frequencies = FingerprintFrequencies(max_holders=self.settings.max_holders)
        self._embedder = embedder
        names = ("fingerprint", "embedding", "meaning", "indexing", "index embedding")
        self.circuits = {
            name: Circuit(
                name,
                failures_to_open=self.settings.failures_to_open,
                open_s=self.settings.open_s,
                clock=clock,
            )
            for name in names
        }
        self._indexer = Indexer(
            index,
            self._prefix_table,
            self._frequencies,
            embedder,
            self.settings,
            writing=self.circuits["indexing"],
            embedding=self.circuits["index embedding"],
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-embed")

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

    async def remember(
        self,
        prompt_id: int,
        namespace: str,
        token_ids: NDArray[np.int32],
        prompt_text: PromptText | None = None,
    ) -> tuple[Failure, ...]:
        """Index one prompt, after its response; what failed is returned and logged, not raised."""
        record = PromptRecord(prompt_id, namespace, token_ids, prompt_text)
        return await self.remember_all([record])

    async def remember_all(
        self, records: Iterable[PromptRecord], batch_size: int = 16
    ) -> tuple[Failure, ...]:
        """Index many prompts, `batch_size` at a time; failures are returned and logged."""
        _, failures = await self._indexer.remember_all(records, batch_size)
        return _logged("remember", failures)

    async def forget(self, namespace: str, prompt_ids: Sequence[int]) -> tuple[Failure, ...]:
        """
        Forget prompts of a namespace; failures are returned and logged.

        Where the backend fails, its stale points go on being nominated. They are harmless: the caller
        finds no such prompt and moves on.
        """
        return _logged("forget", await self._indexer.forget(namespace, prompt_ids))

    async def catch_up(self) -> None:
        """
        Go on where the index was paused and is no longer: to be called every few seconds.

        Raises:  VectorIndexError if the index cannot be opened now that it could be
        """
        num_indexed, num_lost = await self._indexer.catch_up()
        if num_indexed or num_lost:
            log.info("the index got %d prompts that it had missed; %d are lost to it", num_indexed, num_lost)

    @property
    def num_waiting(self) -> int:
        """Prompts that wait until the index is no longer paused."""
        return self._indexer.num_waiting

    def close(self) -> None:
        """Let the embedding threads go; the index stays open."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._indexer.close()

    async def _by_fingerprints(self, namespace: str, token_ids: NDArray[np.int32], tally: Tally) -> None:
        # Only of what the prefix leaves: a system prompt that everybody starts with is neither
        # searched for nor able to crowd out those who share the rest.
        prints = self._indexer.fingerprints(namespace, token_ids[tally.num_prefix_tokens :])
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
        passages, prefix = search.ranked(), tally.prefix
        tally.covered_rest = passages.covered
        for hit in passages.hits:
            shares = prefix and self._prefix_table.shares(namespace, hit.prompt_id, prefix)
            tally.add_passages(hit, shares_prefix=bool(shares))

    async def _by_meaning(self, namespace: str, prompt_text: PromptText, tally: Tally) -> None:
        embedder = self._embedder
        assert embedder is not None, "checked by _is_worth_embedding"
        loop = asyncio.get_running_loop()
        vectors = await self.circuits["embedding"].attempt(
            lambda: loop.run_in_executor(self._thread, embed_prompts, embedder, [prompt_text]),
            timeout_s=self.settings.embed_timeout_s,
        )
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


def _logged(verb: str, failures: Sequence[Failure]) -> tuple[Failure, ...]:
    for failure in failures:
        log.warning("could not %s in full: %s: %s", verb, failure.component, failure.reason)
    return tuple(failures)
