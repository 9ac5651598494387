"""
Putting prompts into the index and taking them out, off the critical path.

The prefix table and the fingerprint frequencies live in this process and take every prompt at
once; the backend and the embedder may be slow or broken, and then a prompt is found by prefix
only. What a paused index misses waits in a backlog. Nothing here decides who may share with whom.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vector_index.backlog import Backlog
from vector_index.base import Entry, VectorIndex
from vector_index.circuit import Circuit, Failure, FailureReason
from vector_index.errors import IndexPausedError
from vector_index.fingerprints import bind, fingerprints
from vector_index.frequencies import FingerprintFrequencies
from vector_index.nomination import NominatorSettings, PromptRecord
from vector_index.prefix_table import PrefixTable
from vector_index.prompt_text import PromptText, TextEmbedder, embed_prompts

log = logging.getLogger(__name__)

_PARTS = ("fingerprint", "embedding", "meaning", "indexing", "index embedding")
_CATCH_UP = 16  # prompts at once


class Indexer:
    """
    Keeps prefix table, frequencies and backend in step. Used from one event loop.

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
        self._embedder = embedder
        self._prefix_table = PrefixTable(self.settings.block_size)
        self._frequencies = FingerprintFrequencies(max_holders=self.settings.max_holders)
        self._backlog = Backlog()
        self.circuits = {
            part: Circuit(
                part,
                failures_to_open=self.settings.failures_to_open,
                open_s=self.settings.open_s,
                clock=clock,
            )
            for part in _PARTS
        }
        # A request's text does not wait for those that are being indexed.
        self._threads = {
            part: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kvshare-{name}")
            for part, name in (("embedding", "embed"), ("index embedding", "embed-index"))
        }

    @property
    def num_waiting(self) -> int:
        """Prompts that wait until the index is no longer paused."""
        return len(self._backlog.records)

    async def remember(
        self,
        prompt_id: int,
        namespace: str,
        token_ids: NDArray[np.int32],
        prompt_text: PromptText | None = None,
    ) -> tuple[Failure, ...]:
        """Index one prompt, after its response; what failed is returned and logged, not raised."""
        return await self.remember_all([PromptRecord(prompt_id, namespace, token_ids, prompt_text)])

    async def remember_all(
        self, records: Iterable[PromptRecord], batch_size: int = 16
    ) -> tuple[Failure, ...]:
        """Index many prompts, `batch_size` at a time; failures are returned and logged."""
        failures: list[Failure] = []
        for batch in _batches(records, batch_size):
            failures += await self._remember_batch(batch)
            await asyncio.sleep(0)  # the event loop gets its turns
        return _logged("remember", failures)

    async def forget(self, namespace: str, prompt_ids: Sequence[int]) -> tuple[Failure, ...]:
        """
        Take prompts of a namespace out of everything; failures are returned and logged.

        Where the backend fails, its stale points go on being nominated. They are harmless: the caller
        finds no such prompt and moves on.
        """
        if not prompt_ids:
            return ()
        for prompt_id in prompt_ids:
            self._prefix_table.remove(namespace, prompt_id)
            self._frequencies.remove(namespace, prompt_id)
        return _logged("forget", await self._delete(namespace, prompt_ids))

    async def catch_up(self) -> None:
        """
        Write what a paused index missed, if it is paused no longer: to be called every few seconds.

        Raises:  VectorIndexError if the index cannot be opened now that it could be
        """
        await self._index.resume()
        if not self._backlog or self._index.why_paused() is not None:
            return
        missed, self._backlog = self._backlog, Backlog()
        for namespace, prompt_ids in missed.deleted.items():
            _logged("forget", await self._delete(namespace, list(prompt_ids)))
        num_added = 0
        while missed.records:
            # A few at a time, so that the prompts forgotten meanwhile are not added.
            some = [missed.records.pop(prompt_id) for prompt_id in list(missed.records)[:_CATCH_UP]]
            wanted = [one for one in some if self._prefix_table.contains(one.namespace, one.prompt_id)]
            num_added += 0 if await self.remember_all(wanted, _CATCH_UP) else len(wanted)
        if num_added or missed.num_dropped:
            lost = missed.num_dropped
            log.info("the index got %d prompts that it had missed; %d are lost to it", num_added, lost)

    def close(self) -> None:
        """Let the embedding threads go; the index stays open."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _fingerprints(self, namespace: str, token_ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        """A prompt's fingerprints as this index stores them."""
        prints = fingerprints(
            token_ids,
            kgram=self.settings.kgram,
            window=self.settings.window,
            max_fingerprints=self.settings.max_fingerprints_of(len(token_ids)),
        )
        return bind(prints, namespace)

    async def _embed(
        self, part: str, texts: Sequence[PromptText], *, timeout_s: float
    ) -> list[NDArray[np.float32] | None] | Failure:
        """A vector (D,) for each text, in the thread of this part and behind its circuit."""
        embedder = self._embedder
        if embedder is None or not texts:
            return [None] * len(texts)
        loop = asyncio.get_running_loop()
        return await self.circuits[part].attempt(
            lambda: loop.run_in_executor(self._threads[part], embed_prompts, embedder, texts),
            timeout_s=timeout_s,
        )

    async def _remember_batch(self, batch: list[PromptRecord]) -> list[Failure]:
        if self._index.why_paused() is not None:
            self._put_off(batch)
            return []
        entries = [self._enter(record) for record in batch]
        texts = {i: record.prompt_text for i, record in enumerate(batch) if record.prompt_text is not None}
        vectors = await self._embed(
            "index embedding", list(texts.values()), timeout_s=self.settings.write_timeout_s
        )
        failures = [vectors] if isinstance(vectors, Failure) else []
        if not isinstance(vectors, Failure):
            for i, vector in zip(texts, vectors, strict=True):
                entries[i] = replace(entries[i], embedding=vector)
        try:
            failed = await self._write(partial(self._index.upsert, entries))
        except IndexPausedError:
            self._put_off(batch)
            return []
        if failed:
            for entry in entries:  # what nobody holds must not count as common
                self._frequencies.remove(entry.namespace, entry.prompt_id)
        return failures + failed

    def _enter(self, record: PromptRecord) -> Entry:
        """Take a prompt into prefix table and frequencies; the entry lacks its embedding."""
        namespace, prompt_id = record.namespace, record.prompt_id
        self._prefix_table.add(namespace, prompt_id, record.token_ids)
        prints = self._fingerprints(namespace, record.token_ids)
        return Entry(prompt_id, namespace, self._frequencies.add(namespace, prompt_id, prints))

    def _put_off(self, records: list[PromptRecord]) -> None:
        """Into the prefix table now, and into the index when it is paused no longer."""
        for record in records:
            self._prefix_table.add(record.namespace, record.prompt_id, record.token_ids)
            self._frequencies.remove(record.namespace, record.prompt_id)
        self._backlog.add(records)

    async def _delete(self, namespace: str, prompt_ids: Sequence[int]) -> list[Failure]:
        try:
            return await self._write(partial(self._index.delete, namespace, prompt_ids))
        except IndexPausedError:
            self._backlog.delete(namespace, prompt_ids)
            return []

    async def _write(self, call: Callable[[], Awaitable[None]]) -> list[Failure]:
        """What failed. Raises IndexPausedError: it has been logged, and what is missed is made up for."""
        failed = await self.circuits["indexing"].attempt(call, timeout_s=self.settings.write_timeout_s)
        return [] if failed is None else [failed]


def _batches(records: Iterable[PromptRecord], size: int) -> Iterator[list[PromptRecord]]:
    remaining = iter(records)
    while batch := list(itertools.islice(remaining, size)):
        yield batch


def _logged(verb: str, failures: Sequence[Failure]) -> tuple[Failure, ...]:
    for failure in failures:
        if failure.reason is FailureReason.CIRCUIT_OPEN:
            continue  # the circuit has logged that, once for all prompts
        log.warning("could not %s in full: %s: %s", verb, failure.component, failure.detail or failure.reason)
    return tuple(failures)
