"""Indexing and forgetting prompts while the index or the embedder fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.vector_index.moody import SETTINGS, TEXT, Setup, tokens
from vector_index import Entry, Nominator, PromptRecord, PromptText
from vector_index.backlog import Backlog


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


async def test_what_was_written_since_is_not_undone(setup: Setup) -> None:
    """A prompt that the index did not take at first, and that was then embedded, or shortened."""
    setup.index.mood = "fails"
    await setup.nominator.remember_all([PromptRecord(number, "a", tokens(number)) for number in (2, 3, 4)])
    setup.index.mood = "works"
    await setup.nominator.remember(2, "a", tokens(2), TEXT)
    await setup.nominator.remember(3, "a", tokens(3)[:300])
    written = dict(setup.index.entries)
    await setup.nominator.catch_up()
    assert setup.index.entries[2] is written[2]
    assert setup.index.entries[3] is written[3]
    assert 4 in setup.index.entries


class Pause:
    """Whether the index is paused."""

    def __init__(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = True
        monkeypatch.setattr(setup.index, "why_paused", lambda: "the disk is full" if self.is_on else None)


async def test_what_was_written_since_a_pause_is_not_undone(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is over, and a prompt was written anew, or forgotten, before what was missed is."""
    pause = Pause(setup, monkeypatch)
    await setup.nominator.remember_all([PromptRecord(number, "a", tokens(number)) for number in (2, 3, 4)])
    pause.is_on = False
    await setup.nominator.remember(2, "a", tokens(2), TEXT)
    await setup.nominator.forget("a", [3])
    await setup.nominator.catch_up()
    assert setup.index.entries[2].embedding is not None
    assert setup.index.entries.keys() == {1, 2, 4}


async def test_what_is_written_while_the_index_catches_up_is_not_undone(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the prompts that still wait and of those that are being embedded; also where writing fails."""
    pause = Pause(setup, monkeypatch)
    setup.embedder.mood = "hangs"
    texts = [TEXT if number < 18 else None for number in range(2, 40)]
    records = [PromptRecord(2 + place, "a", tokens(2 + place), text) for place, text in enumerate(texts)]
    await setup.nominator.remember_all(records)
    pause.is_on = False
    catching_up = asyncio.create_task(setup.nominator.catch_up())
    while not setup.nominator._newest:  # noqa: ASYNC110  the first batch is not being embedded yet
        await asyncio.sleep(0.001)
    written = {}
    for number in (2, 39):
        await setup.nominator.remember(number, "a", tokens(number)[:300])
        written[number] = setup.index.entries[number]
    setup.index.mood = "fails"
    setup.embedder.go_on.set()
    await catching_up
    setup.index.mood = "works"
    await setup.nominator.catch_up()
    assert setup.nominator.num_waiting == 0
    assert all(setup.index.entries[number] is entry for number, entry in written.items())
    assert setup.index.entries.keys() == set(range(1, 40))


async def test_what_is_missed_while_others_are_tried_again_is_not_lost(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request's prompt fails while the index takes those before it: it is tried the next time."""
    setup.index.mood = "fails"
    await setup.nominator.remember(2, "a", tokens(2))
    setup.index.mood = "works"
    upsert = setup.index.upsert

    async def while_another_fails(entries: Sequence[Entry]) -> None:
        monkeypatch.setattr(setup.index, "upsert", upsert)
        setup.index.mood = "fails"
        await setup.nominator.remember(3, "a", tokens(3))
        setup.index.mood = "works"
        await upsert(entries)

    monkeypatch.setattr(setup.index, "upsert", while_another_fails)
    await setup.nominator.catch_up()
    assert setup.index.entries.keys() == {1, 2}
    await setup.nominator.catch_up()
    assert setup.index.entries.keys() == {1, 2, 3}


async def test_what_fails_again_is_not_tried_for_ever(setup: Setup) -> None:
    """Once more, that is all."""
    setup.index.mood = "fails"
    await setup.nominator.remember(2, "a", tokens(2))
    await setup.nominator.catch_up()
    setup.index.mood = "works"
    num_calls = setup.index.num_calls
    await setup.nominator.catch_up()
    assert setup.index.num_calls == num_calls
    assert 2 not in setup.index.entries


async def test_nothing_is_kept_of_what_is_forgotten(setup: Setup) -> None:
    """Neither text nor tokens wait for an index that is down."""
    setup.index.mood = "fails"
    await setup.nominator.remember(2, "a", tokens(2), TEXT)
    await setup.nominator.forget("a", [2])
    kept = setup.nominator._missed
    assert (kept.records, kept.num_text_chars) == ({}, 0)


def test_texts_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above that, prompts wait without, and are found by their tokens."""
    monkeypatch.setattr("vector_index.backlog._MAX_TEXT_CHARS", 20)
    backlog, text = Backlog(), PromptText("123", "1234567")
    backlog.add(PromptRecord(number, "a", tokens(1), text) for number in (1, 2, 3))
    assert [one.prompt_text for one in backlog.records.values()] == [text, text, None]
    backlog.take([1, 9])
    backlog.add([PromptRecord(3, "a", tokens(1), text)])
    assert [one.prompt_text for one in backlog.records.values()] == [text, text]
    assert backlog.num_text_chars == 20
