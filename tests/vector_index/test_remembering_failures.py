"""Indexing and forgetting prompts while the index or the embedder fails."""

from dataclasses import replace

import pytest

from tests.vector_index.moody import SETTINGS, TEXT, Setup, tokens
from vector_index import (
    Nominator,
)


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


async def test_what_an_embedding_takes_is_measured_when_a_prompt_is_stored(setup: Setup) -> None:
    """Of each that is embedded by itself, on the thread that indexes: no request waits for a measurement."""
    measured: list[tuple[int, float]] = []
    setup.nominator.on_embedded = lambda num_tokens, seconds: measured.append((num_tokens, seconds))
    await setup.nominator.remember(2, "a", tokens(2), TEXT)
    await setup.nominator.remember(3, "a", tokens(3), None)
    ((num_tokens, seconds),) = measured
    assert num_tokens == len(tokens(2))
    assert seconds > 0
