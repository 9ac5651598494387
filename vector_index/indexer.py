"""
Putting prompts into the index and taking them out, off the critical path.

The prefix table and the fingerprint frequencies live in this process and take every prompt at
once; the backend and the embedder may be slow or broken, and then a prompt is found by prefix
only until the next rebuild. What a paused index misses waits in a backlog. Nothing here decides
who may share with whom.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vector_index.backlog import Backlog
from vector_index.base import Entry, VectorIndex
from vector_index.circuit import Circuit, Failure
from vector_index.errors import IndexPausedError
from vector_index.fingerprints import bind, fingerprints
from vector_index.frequencies import FingerprintFrequencies
from vector_index.nomination import NominatorSettings, PromptRecord
from vector_index.prefix_table import PrefixTable
from vector_index.prompt_text import PromptText, TextEmbedder, embed_prompts

log = logging.getLogger(__name__)

_CATCH_UP = 16  # prompts at once


class Indexer:
    """Keeps prefix table, frequencies and backend in step; the backend's failures are values."""

    def __init__(
        self,
        index: VectorIndex,
        prefix_table: PrefixTable,
        frequencies: FingerprintFrequencies,
        embedder: TextEmbedder | None,
        settings: NominatorSettings,
        *,
        writing: Circuit,
        embedding: Circuit,
    ) -> None:
        self._index = index
        self._prefix_table = prefix_table
        self._frequencies = frequencies
        self._embedder = embedder
        self._settings = settings
        self._writing = writing
        self._embedding = embedding
        self._backlog = Backlog()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-embed-index")

    @property
    def num_waiting(self) -> int:
        """Prompts that a paused index has not got yet."""
        return len(self._backlog.records)

    async def remember_all(
        self, records: Iterable[PromptRecord], batch_size: int
    ) -> tuple[int, list[Failure]]:
        """Index records in batches; how many the backend took, and what went wrong."""
        num_indexed = 0
        failures: list[Failure] = []
        for batch in _batches(records, batch_size):
            if self._index.why_paused() is not None:
                self._put_off(batch)
                continue
            entries = [self._enter(record) for record in batch]
            embeddings = await self._embed([record.prompt_text for record in batch])
            if isinstance(embeddings, Failure):
                failures.append(embeddings)
                embeddings = [None] * len(batch)
            complete = _with_embeddings(entries, embeddings)
            failed = await self._write(partial(self._index.upsert, complete))
            if failed is None:
                self._put_off(batch)
                continue
            if failed:
                # What nobody holds must not count as common.
                for entry in entries:
                    self._frequencies.remove(entry.namespace, entry.prompt_id)
            failures += failed
            num_indexed += 0 if failed else len(batch)
            await asyncio.sleep(0)  # a rebuild must leave the event loop its turns
        return num_indexed, failures

    async def catch_up(self) -> tuple[int, int]:
        """
        Write what a paused index missed, if it is paused no longer: prompts added, and lost for good.

        Raises:  VectorIndexError if the index cannot be opened now that it could be
        """
        await self._index.resume()
        if not self._backlog or self._index.why_paused() is not None:
            return 0, 0
        missed, self._backlog = self._backlog, Backlog()
        for namespace, prompt_ids in missed.deleted.items():
            await self._delete(namespace, list(prompt_ids))
        num_indexed = 0
        while missed.records:
            # A few at a time, so that the prompts forgotten meanwhile are not added.
            some = [missed.records.pop(prompt_id) for prompt_id in list(missed.records)[:_CATCH_UP]]
            wanted = [one for one in some if self._prefix_table.contains(one.namespace, one.prompt_id)]
            num_indexed += (await self.remember_all(wanted, _CATCH_UP))[0]
        return num_indexed, missed.num_dropped

    async def forget(self, namespace: str, prompt_ids: Sequence[int]) -> list[Failure]:
        """Take prompts out of everything; a backend that fails keeps stale points."""
        if not prompt_ids:
            return []
        for prompt_id in prompt_ids:
            self._prefix_table.remove(namespace, prompt_id)
            self._frequencies.remove(namespace, prompt_id)
        return await self._delete(namespace, prompt_ids)

    def close(self) -> None:
        """Let the embedding thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def fingerprints(self, namespace: str, token_ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        """A prompt's fingerprints as this index stores them."""
        prints = fingerprints(
            token_ids,
            kgram=self._settings.kgram,
            window=self._settings.window,
            max_fingerprints=self._settings.max_fingerprints_of(len(token_ids)),
        )
        return bind(prints, namespace)

    def _enter(self, record: PromptRecord) -> Entry:
        """Take a prompt into prefix table and frequencies; the entry lacks its embedding."""
        namespace, prompt_id = record.namespace, record.prompt_id
        self._prefix_table.add(namespace, prompt_id, record.token_ids)
        prints = self.fingerprints(namespace, record.token_ids)
        return Entry(prompt_id, namespace, self._frequencies.add(namespace, prompt_id, prints))

    async def _embed(self, texts: list[PromptText | None]) -> list[NDArray[np.float32] | None] | Failure:
        embedder = self._embedder
        known = [text for text in texts if text is not None]
        if embedder is None or not known:
            return [None] * len(texts)
        loop = asyncio.get_running_loop()
        vectors = await self._embedding.attempt(
            lambda: loop.run_in_executor(self._thread, embed_prompts, embedder, known),
            timeout_s=self._settings.write_timeout_s,
        )
        if isinstance(vectors, Failure):
            return vectors
        in_order = iter(vectors)
        return [None if text is None else next(in_order) for text in texts]

    def _put_off(self, records: list[PromptRecord]) -> None:
        """Into the prefix table now, and into the index when it is paused no longer."""
        for record in records:
            self._prefix_table.add(record.namespace, record.prompt_id, record.token_ids)
            self._frequencies.remove(record.namespace, record.prompt_id)
        self._backlog.add(records)

    async def _delete(self, namespace: str, prompt_ids: Sequence[int]) -> list[Failure]:
        failed = await self._write(lambda: self._index.delete(namespace, prompt_ids))
        if failed is None:
            self._backlog.delete(namespace, prompt_ids)
        return failed or []

    async def _write(self, call: Callable[[], Awaitable[None]]) -> list[Failure] | None:
        """
        What failed; None where the index is paused.

        That is no failure: its beginning was logged, and what the index misses is made up for.
        """

        async def write() -> bool:
            try:
                await call()
            except IndexPausedError:
                return False
            return True

        done = await self._writing.attempt(write, timeout_s=self._settings.write_timeout_s)
        if isinstance(done, Failure):
            return [done]
        return [] if done else None


def _with_embeddings(entries: list[Entry], embeddings: list[NDArray[np.float32] | None]) -> list[Entry]:
    pairs = zip(entries, embeddings, strict=True)
    return [replace(entry, embedding=embedding) for entry, embedding in pairs]


def _batches(records: Iterable[PromptRecord], size: int) -> Iterator[list[PromptRecord]]:
    remaining = iter(records)
    while batch := list(itertools.islice(remaining, size)):
        yield batch
