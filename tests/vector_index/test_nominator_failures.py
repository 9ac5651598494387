"""A search whose index or embedder fails, hangs or lies."""

import asyncio
import logging
import time

import numpy as np
import pytest

from tests.vector_index.moody import SETTINGS, SHORT, TEXT, Setup, tokens
from vector_index import (
    CircuitState,
    Failure,
    FailureReason,
    Nominator,
    PromptText,
)


@pytest.mark.parametrize("mood", ["fails", "surprises", "hangs"])
async def test_a_moody_index_leaves_the_prefix(setup: Setup, mood: str) -> None:
    """Without the index the prefix still nominates, in time, and the failures are named."""
    setup.index.mood = mood
    query = np.concatenate([tokens(1)[:100], tokens(2)])
    started = time.perf_counter()
    nomination = await setup.nominator.nominate("a", query, TEXT, allow_dense=True)
    assert time.perf_counter() - started < 30.0
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
    assert time.perf_counter() - started < 30.0
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
