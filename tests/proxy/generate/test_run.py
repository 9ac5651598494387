"""A run: the engine's events of one or several prompts, as one queue of deltas."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvshare.engine import Delta, GenerationRequest, SamplingParams
from kvshare.errors import EngineError
from kvshare.requests import Prompt
from proxy.generate.run import AnswerRun
from proxy.request_record import RequestRecord
from tests.proxy.fake_engine import Behaviour, FakeEngine
from vector_index import PromptText


def asking(engine: FakeEngine, *texts: str, n: int = 1, record: RequestRecord | None = None) -> AnswerRun:
    return AnswerRun(
        engine,
        [
            GenerationRequest(
                request_id=text,
                namespace=engine.namespace(tenant="t", scope="tenant"),
                prompt=Prompt(np.arange(10, dtype=np.int32), PromptText(text, text)),
                sampling=SamplingParams(max_tokens=100, n=n),
            )
            for text in texts
        ],
        record or RequestRecord("r", "r"),
    )


async def read(run: AnswerRun, texts: dict[int, str]) -> dict[int, str]:
    """Add to `texts` what each choice comes to."""
    async for delta in run.deltas():
        assert isinstance(delta, Delta)
        texts[delta.choice] = texts.get(delta.choice, "") + delta.text
    return texts


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    """The second prompt's choices follow the first one's."""
    record = RequestRecord("r", "r")
    run = asking(FakeEngine(), "ab", "cd", n=2, record=record)
    async with run.open():
        assert await read(run, {}) == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}
    assert (len(record.answer.reports), len(record.answer.finished)) == (2, 2)


async def test_prompts_that_wait_for_each_other_all_start() -> None:
    """With one slot the second prompt starts when the first has ended; its deltas wait in the queue."""
    run = asking(FakeEngine(Behaviour(max_running=1)), "ab", "cd")
    async with asyncio.timeout(60), run.open():
        assert await read(run, {}) == {0: "ab", 1: "cd"}


async def test_a_slow_reader_holds_no_slot() -> None:
    """The engine is free again when it has computed, however much of the answer is still to be read."""
    engine = FakeEngine()
    run = asking(engine, "a long answer")
    async with run.open():
        await asyncio.wait_for(engine.freed.wait(), 20)
        assert engine.num_running == 0
        assert await read(run, {}) == {0: "a long answer"}


async def test_silence_is_noticed() -> None:
    """None stands for each heartbeat's time without a delta."""
    run = asking(FakeEngine(Behaviour(prefill_s=0.2)), "a")
    async with run.open():
        found = [delta async for delta in run.deltas(heartbeat_s=0.02)]
    assert found.count(None) >= 2
    assert [delta.text for delta in found if delta is not None] == ["a"]


async def test_deltas_that_came_before_a_failure_are_read_first() -> None:
    """Then the engine's error is raised, translated."""
    run = asking(FakeEngine(Behaviour(fail_after_tokens=2)), "abc")
    texts: dict[int, str] = {}
    async with run.open():
        with pytest.raises(EngineError):
            await read(run, texts)
    assert texts == {0: "ab"}
