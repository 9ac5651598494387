"""A broken or slow index or embedder costs candidates and nothing else."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from vector_index import (
    CircuitState,
    EmbedderError,
    Entry,
    Failure,
    FailureReason,
    Hit,
    IndexUnavailableError,
    Nominator,
    NominatorSettings,
    PromptText,
    VectorIndex,
)
from vector_index.base import Vector, VectorName

TEXT = PromptText("weather", "weather")
SETTINGS = NominatorSettings(
    search_timeout_s=0.3,  # a busy machine may take a tenth of a second from anybody
    embed_timeout_s=0.3,
    write_timeout_s=1.0,
    failures_to_open=3,
    open_s=30,
    max_distance=0.5,
)
SHORT = replace(SETTINGS, search_timeout_s=0.02)


class MoodyIndex(VectorIndex):
    """An index in a dictionary that works, fails, or hangs, as its `mood` says."""

    mood = "works"
    num_good_calls = 10**9

    def __init__(self) -> None:
        super().__init__(SETTINGS.schema(MoodyEmbedder()))
        self.entries: dict[int, Entry] = {}
        self.num_calls = 0

    async def _mood(self) -> None:
        self.num_calls += 1
        if self.mood == "fails":
            raise IndexUnavailableError("connection refused")
        if self.mood == "surprises":
            raise RuntimeError("a bug")
        if self.mood == "blocks":  # as a native call does that holds the GIL
            time.sleep(2 * SHORT.search_timeout_s)  # noqa: ASYNC251  this is the point
        self.num_good_calls -= 1
        if self.mood == "hangs" or self.num_good_calls < 0:
            await asyncio.sleep(60)

    async def open(self) -> None:
        await self._mood()

    async def close(self) -> None:
        await self._mood()

    async def recreate(self) -> None:
        await self._mood()
        self.entries.clear()

    async def upsert(self, entries: Sequence[Entry]) -> None:
        await self._mood()
        self.entries |= {entry.prompt_id: entry for entry in entries}

    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        await self._mood()
        for prompt_id in prompt_ids:
            self.entries.pop(prompt_id, None)

    async def _nearest(
        self, namespace: str, name: VectorName, vector: Vector, *, limit: int, min_score: float | None
    ) -> list[tuple[object, Hit]]:
        await self._mood()
        own = [entry for entry in self.entries.values() if entry.namespace == namespace]
        if name == "sparse":
            shared = [float(len(np.intersect1d(entry.fingerprints, vector))) for entry in own]
        else:
            shared = [float(entry.embedding is not None) for entry in own]
        hits = [Hit(entry.prompt_id, score) for entry, score in zip(own, shared, strict=True) if score]
        return [(namespace, hit) for hit in hits[:limit]]

    async def count(self, namespace: str | None = None) -> int:
        await self._mood()
        return len(self.entries)

    async def maintain(self) -> None:
        await self._mood()


class MoodyEmbedder:
    """An embedder that works, fails, hangs, or returns nonsense, as its `mood` says."""

    name = "moody"
    dimension = 2

    def __init__(self) -> None:
        self.mood = "works"
        self.go_on = threading.Event()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self.mood == "fails":
            raise EmbedderError("no weights")
        if self.mood == "quotes":
            raise ValueError(texts[0])
        if self.mood == "hangs":
            self.go_on.wait(10)
        value = np.nan if self.mood == "nonsense" else 2**-0.5
        return np.full((len(texts), 2), value, dtype=np.float32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 30_000, 600, dtype=np.int32)


class Setup:
    """A nominator over moody parts, with one prompt stored."""

    def __init__(self, settings: NominatorSettings = SETTINGS) -> None:
        self.index = MoodyIndex()
        self.embedder = MoodyEmbedder()
        self.clock = Clock()
        self.nominator = Nominator(self.index, embedder=self.embedder, settings=settings, clock=self.clock)


@pytest.fixture
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    setup = Setup(getattr(request, "param", SETTINGS))
    assert await setup.nominator.remember(1, "a", tokens(1), TEXT) == ()
    yield setup
    setup.embedder.go_on.set()
    setup.nominator.close()


@pytest.mark.parametrize("mood", ["fails", "surprises", "hangs"])
async def test_a_moody_index_leaves_the_prefix(setup: Setup, mood: str) -> None:
    """Without the index the prefix still nominates, in time, and the failures are named."""
    setup.index.mood = mood
    query = np.concatenate([tokens(1)[:100], tokens(2)])
    started = time.perf_counter()
    nomination = await setup.nominator.nominate("a", query, TEXT, allow_dense=True)
    assert time.perf_counter() - started < 3.0
    assert [c.prompt_id for c in nomination.candidates] == [1]
    assert nomination.candidates[0].sources == ("prefix",)
    assert [failure.component for failure in nomination.failures] == ["fingerprint", "embedding"]


async def test_what_was_found_before_the_failure_counts(setup: Setup) -> None:
    """An index that stops answering after the first search leaves that search's candidates."""
    query = np.concatenate([tokens(2), tokens(1)[:200]])
    setup.index.num_good_calls = 1
    nomination = await setup.nominator.nominate("a", query, None, allow_dense=False)
    assert [c.sources for c in nomination.candidates] == [("fingerprint",)]
    assert [failure.component for failure in nomination.failures] == ["fingerprint"]


@pytest.mark.parametrize("setup", [SHORT], indirect=True)
async def test_a_search_that_blocks_is_the_last_of_its_request(setup: Setup) -> None:
    """Nobody can break it off: what it found counts, no other follows, and it has failed."""
    await setup.nominator.remember(2, "a", tokens(2))
    query = np.concatenate([tokens(3)[:100], tokens(1)[:100], tokens(2)[:100]])
    setup.index.num_calls = 0
    setup.index.mood = "blocks"
    nomination = await setup.nominator.nominate("a", query, None, allow_dense=False)
    assert {candidate.prompt_id for candidate in nomination.candidates} == {1, 2}
    assert nomination.failures == (Failure("fingerprint", FailureReason.TIMEOUT),)
    assert setup.index.num_calls == 1


@pytest.mark.parametrize("setup", [SHORT], indirect=True)
async def test_an_index_that_blocks_is_left_out_soon(setup: Setup) -> None:
    """After three late searches by fingerprints and by meaning requests no longer wait for either."""
    setup.index.mood = "blocks"
    for _ in range(SETTINGS.failures_to_open):
        late = await setup.nominator.nominate("a", tokens(5), TEXT, allow_dense=True)
        assert [failure.component for failure in late.failures] == ["fingerprint", "embedding"]
    num_calls = setup.index.num_calls
    spared = await setup.nominator.nominate("a", tokens(5), TEXT, allow_dense=True)
    assert {failure.reason for failure in spared.failures} == {FailureReason.CIRCUIT_OPEN}
    assert setup.index.num_calls == num_calls


async def test_a_prompt_that_another_process_stored_is_nominated(setup: Setup) -> None:
    """Only the index knows it: the score of its hit gives the share."""
    other = Nominator(setup.index, settings=SETTINGS)
    query = np.concatenate([tokens(2)[:300], tokens(1)[:300]])
    nomination = await other.nominate("a", query, None, allow_dense=False)
    other.close()
    assert nomination.failures == ()
    assert nomination.candidates[0].score == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("mood", ["fails", "hangs", "nonsense"])
async def test_a_moody_embedder_leaves_prefix_and_fingerprints(setup: Setup, mood: str) -> None:
    """Without embeddings the other stages answer as ever, in time."""
    setup.embedder.mood = mood
    query = np.concatenate([tokens(2), tokens(1)[:200]])
    started = time.perf_counter()
    nomination = await setup.nominator.nominate("a", query, TEXT, allow_dense=True)
    assert time.perf_counter() - started < 3.0
    assert [c.sources for c in nomination.candidates] == [("fingerprint",)]
    assert [failure.component for failure in nomination.failures] == ["embedder"]


async def test_the_circuit_spares_a_dead_index(setup: Setup) -> None:
    """After three failures the index is not asked again until the time is over, then it is."""
    setup.index.mood = "fails"
    for _ in range(3):
        await setup.nominator.nominate("a", tokens(2), None, allow_dense=False)
    num_calls = setup.index.num_calls
    setup.index.mood = "works"
    refused = await setup.nominator.nominate("a", tokens(2), None, allow_dense=False)
    assert refused.failures == (Failure("fingerprint", FailureReason.CIRCUIT_OPEN),)
    assert setup.index.num_calls == num_calls
    assert setup.nominator.circuits["fingerprint"].state is CircuitState.OPEN
    setup.clock.now = 31.0
    healed = await setup.nominator.nominate("a", tokens(1), None, allow_dense=False)
    assert healed.failures == ()
    assert setup.nominator.circuits["fingerprint"].state is not CircuitState.OPEN


@pytest.mark.parametrize("mood", ["fails", "surprises", "hangs"])
async def test_remembering_without_index_keeps_the_prefix(setup: Setup, mood: str) -> None:
    """The failure is returned, and the prompt is found by its prefix."""
    setup.index.mood = mood
    failures = await setup.nominator.remember(2, "a", tokens(2), TEXT)
    assert [failure.component for failure in failures] == ["indexing"]
    setup.index.mood = "works"
    nomination = await setup.nominator.nominate("a", tokens(2), None, allow_dense=False)
    assert [c.prompt_id for c in nomination.candidates] == [2]


async def test_a_failing_index_is_logged_twice(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """However many prompts it does not take: once when the circuit opens, once when the index works again."""
    for mood, last in (("fails", 9), ("works", 10)):
        setup.index.mood = mood
        for minute in range(last - 8, last + 1):
            await setup.nominator.remember(2, "a", tokens(2))
            await setup.nominator.forget("a", [3])
            setup.clock.now = 60.0 * minute
    failed, works = caplog.messages
    assert failed.startswith("indexing of the index failed")
    assert works.startswith("indexing of the index works again")


async def test_what_the_index_did_not_take_is_not_common(setup: Setup) -> None:
    """A passage that no stored prompt holds is stored with the next, however often it failed."""
    settings = replace(SETTINGS, max_holders=1, failures_to_open=100)
    nominator = Nominator(setup.index, settings=settings)
    setup.index.mood = "fails"
    await nominator.remember(2, "a", tokens(2))
    setup.index.mood = "works"
    await nominator.remember(3, "a", tokens(2))
    assert len(setup.index.entries[3].fingerprints) > 10
    nominator.close()


@pytest.mark.parametrize("mood", ["fails", "hangs", "nonsense"])
async def test_remembering_without_embedder_keeps_the_fingerprints(setup: Setup, mood: str) -> None:
    """A prompt whose text cannot be embedded is indexed without."""
    setup.embedder.mood = mood
    failures = await setup.nominator.remember(2, "a", tokens(2), TEXT)
    assert [failure.component for failure in failures] == ["index_embedder"]
    assert setup.index.entries[2].embedding is None
    assert len(setup.index.entries[2].fingerprints) > 10


@pytest.mark.parametrize("mood", ["fails", "hangs"])
async def test_forgetting_without_index_does_not_raise(setup: Setup, mood: str) -> None:
    """The prefix forgets; the stale point of the backend stays, and a failure says so."""
    setup.index.mood = mood
    failures = await setup.nominator.forget("a", [1])
    assert [failure.component for failure in failures] == ["indexing"]
    setup.index.mood = "works"
    stale = await setup.nominator.nominate("a", tokens(1), None, allow_dense=False)
    assert [c.sources for c in stale.candidates] == [("fingerprint",)]


async def test_cancellation_passes_through(setup: Setup) -> None:
    """A client that hangs up cancels the nomination, and that is no failure of the index."""
    setup.index.mood = "hangs"
    for _ in range(SETTINGS.failures_to_open):
        task = asyncio.create_task(setup.nominator.nominate("a", tokens(1), None, allow_dense=False))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert setup.nominator.circuits["fingerprint"].state is not CircuitState.OPEN


async def test_failures_carry_no_text_and_no_tokens(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """What is logged of a failure is the part, the reason and the place, at any level."""
    caplog.set_level(logging.DEBUG)
    setup.embedder.mood = "quotes"
    secret = PromptText("SECRET", "SECRET")
    nomination = await setup.nominator.nominate("a", tokens(5), secret, allow_dense=True)
    assert nomination.failures
    assert "SECRET" not in str(nomination.failures)
    assert "embedder failed: ValueError" in caplog.text
    assert "SECRET" not in caplog.text
    assert str(tokens(5)[0]) not in str(nomination.failures)
