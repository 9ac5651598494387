"""
Adds prompts to the index and removes them, off the critical path.

The prefix table and the fingerprint frequencies are in this process's memory and updated at once. The backend
and the embedder may be slow or fail; then a prompt is found by its prefix only. Changes that a paused index
misses wait in a backlog. The caller decides by the namespace which prompts may share.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vector_index.backlog import Backlog
from vector_index.base import Entry, VectorIndex
from vector_index.circuit import CircuitState, Failure, circuits_of_index
from vector_index.errors import IndexPausedError
from vector_index.fingerprints import FingerprintFrequencies, bind, fingerprints
from vector_index.nomination import NominatorSettings, PromptRecord
from vector_index.prefix_table import PrefixTable
from vector_index.prompt_text import PromptText, TextEmbedder, embed_prompts

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_CATCH_UP = 16  # prompts at once


class Indexer:
    """
    Updates prefix table, frequencies and backend together. Used from one event loop.

    The caller opens and closes the index. The prefix table and the frequencies know only prompts that this
    process added; the index may have others from other processes.
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
        self._missed = Backlog()  # prompts that a failing index has not taken: they are tried once more
        self._late = Backlog()  # what is being written of a backlog, and has not been begun
        self._newest: dict[int, PromptRecord] = {}  # of the prompts that are being written
        self.circuits = circuits_of_index(
            failures_to_open=self.settings.failures_to_open, open_s=self.settings.open_s, clock=clock
        )
        # Called with the tokens of a stored prompt, and the seconds of its embedding; from any thread.
        self.on_embedded: Callable[[int, float], None] = lambda num_tokens, seconds: None
        # Two threads, so that a request's text does not wait for texts that are being indexed.
        self._threads = {
            part: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kvshare-{name}")
            for part, name in (("embedder", "embed"), ("index_embedder", "embed-index"))
        }

    @property
    def num_waiting(self) -> int:
        """Return the number of prompts that wait until the index is no longer paused."""
        return len(self._backlog.records)

    async def remember(
        self,
        prompt_id: int,
        namespace: str,
        token_ids: NDArray[np.int32],
        prompt_text: PromptText | None = None,
    ) -> tuple[Failure, ...]:
        """Index one prompt, after its response; failures are returned, not raised."""
        return await self.remember_all([PromptRecord(prompt_id, namespace, token_ids, prompt_text)])

    async def remember_all(
        self, records: Iterable[PromptRecord], batch_size: int = 16
    ) -> tuple[Failure, ...]:
        """Index many prompts, `batch_size` at a time; failures are returned. Their circuits log them."""
        failures: list[Failure] = []
        for batch in _batches(records, batch_size):
            failures += await self._remember_batch(batch)
            await asyncio.sleep(0)  # lets other tasks run
        return tuple(failures)

    async def forget(self, namespace: str, prompt_ids: Sequence[int]) -> tuple[Failure, ...]:
        """
        Remove prompts of a namespace from all parts of the index; failures are returned.

        If the backend fails, its stale points may still be nominated. The caller looks each candidate up
        in the tree and ignores those that it does not find.
        """
        if not prompt_ids:
            return ()
        self._supersede(prompt_ids)
        for prompt_id in prompt_ids:
            self._prefix_table.remove(namespace, prompt_id)
            self._frequencies.remove(namespace, prompt_id)
        return tuple(await self._delete(namespace, prompt_ids))

    async def catch_up(self) -> None:
        """Write what a paused index missed. Call it every few seconds. Raises VectorIndexError."""
        await self._index.resume()
        await self._add_missed()
        if not self._backlog or self._index.why_paused() is not None:
            return
        missed = self._late = self._backlog
        self._backlog = Backlog()
        for namespace, prompt_ids in missed.deleted.items():
            await self._delete(namespace, list(prompt_ids))
        num_added = 0
        while missed.records:
            # A few at a time: prompts that are forgotten, or written again, meanwhile are not added.
            some = missed.take(list(missed.records)[:_CATCH_UP])
            wanted = self._known(some)
            failures = await self.remember_all(wanted, _CATCH_UP)
            if any(failure.component == "indexing" for failure in failures):  # later, then
                left = [*self._missed.take(one.prompt_id for one in wanted), *missed.records.values()]
                self._late = Backlog()
                self._backlog.add(one for one in left if one.prompt_id not in self._backlog.records)
                self._backlog.num_dropped += missed.num_dropped
                return
            num_added += 0 if failures else len(wanted)
        if num_added or missed.num_dropped:
            log.info(
                "the index has caught up: %d prompts were added. %d were too many to wait and are found by "
                "equal prefixes only",
                num_added,
                missed.num_dropped,
            )

    async def _add_missed(self) -> None:
        """Once the index takes writes again, what it did not take meanwhile; what fails again is dropped."""
        if not self._missed or self.circuits["indexing"].state is not CircuitState.CLOSED:
            return
        for tried in _batches(list(self._missed.records), _CATCH_UP):
            # A few at a time: what is forgotten, or written again, meanwhile is not tried.
            some = self._missed.take(tried)
            await self.remember_all(some, _CATCH_UP)
            held = self._missed.records
            self._missed.take(one.prompt_id for one in some if held.get(one.prompt_id) is one)

    def _known(self, records: Iterable[PromptRecord]) -> list[PromptRecord]:
        """Return the prompts that were not forgotten meanwhile."""
        return [one for one in records if self._prefix_table.contains(one.namespace, one.prompt_id)]

    def close(self) -> None:
        """End the embedding threads; the index stays open."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _fingerprints(self, namespace: str, token_ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        """Return a prompt's fingerprints as this index stores them."""
        prints = fingerprints(
            token_ids,
            kgram=self.settings.kgram,
            window=self.settings.window,
            max_fingerprints=self.settings.max_fingerprints_of(len(token_ids)),
        )
        return bind(prints, namespace)

    async def _embed(
        self,
        part: str,
        texts: Sequence[PromptText | None],
        *,
        timeout_s: float,
        on_end: Callable[[float], None] = lambda seconds: None,
    ) -> list[NDArray[np.float32] | None] | Failure:
        """
        Return a vector (D,) for each text, None for none, in the thread of this part and behind its circuit.

        `on_end`: called there with the seconds that it took.
        """
        embedder = self._embedder
        if embedder is None or not any(texts):
            return [None] * len(texts)
        known = [text or PromptText("", "") for text in texts]
        loop = asyncio.get_running_loop()

        def embed() -> list[NDArray[np.float32] | None]:
            began = time.perf_counter()
            vectors = embed_prompts(embedder, known)
            on_end(time.perf_counter() - began)
            return vectors

        return await self.circuits[part].attempt(
            lambda: loop.run_in_executor(self._threads[part], embed),
            timeout_s=timeout_s,
        )

    async def _remember_batch(self, batch: list[PromptRecord]) -> list[Failure]:
        self._supersede(record.prompt_id for record in batch)
        if self._index.why_paused() is not None:
            self._put_off(batch)
            return []
        self._newest |= {record.prompt_id: record for record in batch}
        try:
            return await self._write_batch(batch)
        finally:
            for record in self._of_newest(batch):
                self._newest.pop(record.prompt_id, None)

    def _supersede(self, prompt_ids: Iterable[int]) -> None:
        """What is written, or forgotten, from now on is not undone by what still waits or is under way."""
        ids = list(prompt_ids)
        for backlog in (self._backlog, self._missed, self._late):
            backlog.take(ids)
        for prompt_id in ids:
            self._newest.pop(prompt_id, None)

    def _of_newest(self, batch: Iterable[PromptRecord]) -> list[PromptRecord]:
        """Return those that were not written again, or forgotten, since their writing began."""
        return [record for record in batch if self._newest.get(record.prompt_id) is record]

    async def _write_batch(self, batch: list[PromptRecord]) -> list[Failure]:
        entries = [self._enter(record) for record in batch]
        texts = [record.prompt_text for record in batch]
        failures: list[Failure] = []
        vectors = await self._embed(
            "index_embedder",
            texts,
            timeout_s=self.settings.write_timeout_s,
            on_end=partial(self._note_embedded, batch),
        )
        if isinstance(vectors, Failure):
            failures.append(vectors)
        else:
            entries = [replace(entry, embedding=one) for entry, one in zip(entries, vectors, strict=True)]
        newest = self._of_newest(batch)
        entries = [entry for record, entry in zip(batch, entries, strict=True) if record in newest]
        try:
            failed = await self._write(partial(self._index.upsert, entries)) if entries else []
        except IndexPausedError:
            self._put_off(self._of_newest(batch))
            return []
        if failed:
            newest = self._of_newest(batch)
            self._missed.add(self._known(newest))
            for record in newest:  # fingerprints that were not stored must not be counted
                self._frequencies.remove(record.namespace, record.prompt_id)
        return failures + failed

    def _note_embedded(self, batch: Sequence[PromptRecord], seconds: float) -> None:
        """Report the seconds of a single embedding; of several at once, what one takes is not known."""
        if len(batch) == 1:
            self.on_embedded(len(batch[0].token_ids), seconds)

    def _enter(self, record: PromptRecord) -> Entry:
        """Add a prompt to prefix table and frequencies; returns its index entry without embedding."""
        namespace, prompt_id = record.namespace, record.prompt_id
        self._prefix_table.add(namespace, prompt_id, record.token_ids)
        prints = self._fingerprints(namespace, record.token_ids)
        return Entry(prompt_id, namespace, self._frequencies.add(namespace, prompt_id, prints))

    def _put_off(self, records: list[PromptRecord]) -> None:
        """Add prompts to the prefix table now, and to the index once it is no longer paused."""
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
        """Call the backend; returns the failure if there was one. Raises IndexPausedError."""
        failed = await self.circuits["indexing"].attempt(call, timeout_s=self.settings.write_timeout_s)
        return [] if failed is None else [failed]


def _batches(records: Iterable[_T], size: int) -> Iterator[list[_T]]:
    remaining = iter(records)
    while batch := list(itertools.islice(remaining, size)):
        yield batch
