"""Answers whose grammar says late that they are complete: when they end, and what of them comes last."""

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import pytest

from kvshare.conversation.lark import Grammar
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.scheduler import Scheduler
from kvshare.embedded.task import Task
from kvshare.engine import Delta, Event, Finished, FinishReason, GenerationRequest, SamplingParams
from kvshare.errors import RequestError
from kvshare.served_model import DEMO
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.rates import Rates

SCHEMA = {"x-guidance": {"whitespace_flexible": False}, "const": {"name": "Ann", "age": 41}}
JSON = Grammar(f"start: json\njson: %json {json.dumps(SCHEMA)}")
TEXT = '{"name":"Ann","age":41}'


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    settings: dict[str, object] = {"model.path": DEMO, "store.path": str(tmp_path), "index.dense": False}
    settings["cost.measure_at_start"] = False
    engine = EmbeddedEngine(load_settings(overrides=settings))
    await engine.start()
    yield engine
    await engine.stop()


async def deltas(engine: EmbeddedEngine, **sampling: Any) -> list[Delta]:
    """Those of a request, whose tokens are counted once each."""
    params = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, "grammar": JSON, **sampling})
    events: list[Event] = []
    request = GenerationRequest(
        request_id="r",
        namespace=engine.namespace(tenant="t", scope="tenant"),
        prompt=await engine.encode_text("Who?"),
        sampling=params,
    )
    await engine.generate(request, events.append)
    found = [event for event in events if isinstance(event, Delta)]
    assert isinstance(events[-1], Finished)
    assert events[-1].num_completion_tokens == sum(delta.num_tokens for delta in found)
    return found


def text(answer: list[Delta]) -> str:
    return "".join(delta.text for delta in answer)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_the_end_comes_after_the_last_token(
    engine: EmbeddedEngine, n: int, logprobs: int | None
) -> None:
    """Each token has gone out before; log-probabilities are complete, and no token is computed beyond it."""
    found = await deltas(engine, n=n, logprobs=logprobs)
    for number in range(n):
        answer = [delta for delta in found if delta.choice == number]
        assert text(answer) == TEXT
        assert [delta.num_tokens for delta in answer] == [1] * (len(answer) - 1) + [0]
        assert [delta.finish_reason for delta in answer] == [None] * (len(answer) - 1) + [FinishReason.STOP]
        entries = [entry for delta in answer for entry in delta.logprobs]
        assert "".join(entry.text for entry in entries) == ("" if logprobs is None else TEXT)


async def test_an_answer_that_is_complete_at_the_limit_has_stopped(engine: EmbeddedEngine) -> None:
    """One token less, and the limit has cut it."""
    number = sum(delta.num_tokens for delta in await deltas(engine))
    ends = {limit: (await deltas(engine, max_tokens=limit))[-1] for limit in (number - 1, number, number + 1)}
    assert [end.finish_reason for end in ends.values()] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.STOP,
    ]


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_text_that_was_held_back_comes_with_the_end(
    engine: EmbeddedEngine, logprobs: int | None
) -> None:
    """The last bracket could begin a stop string until the answer is known to be complete."""
    answer = await deltas(engine, stop=("}!",), logprobs=logprobs)
    assert text(answer) == TEXT
    assert (answer[-1].text, answer[-1].num_tokens) == ("}", 0)
    assert [entry.text for entry in answer[-1].logprobs] == ([] if logprobs is None else ["}"])
    stopped = await deltas(engine, stop=("Ann",), logprobs=logprobs)
    assert text(stopped) == '{"name":"'
    assert (stopped[-1].finish_reason, stopped[-1].stop) == (FinishReason.STOP, "Ann")


class Answer:
    """A task of the scheduler, whose grammar has not taken the last token when its quantum ends."""

    prefilled = True
    num_remaining = 100  # unless it is prefilled

    def __init__(self, log: list[str], name: str, settles: object = False, *, num_tokens: int = 1) -> None:
        self.log, self.name, self.settles, self.num_left = log, name, settles, num_tokens
        self.cancelled = False
        self.may_begin = threading.Event()
        self.tenant, self.num_queries = "", list[int]()
        rates = Rates.linear(prefill_tokens_per_s=1000, load_bytes_per_s=1e9, bytes_per_token=1)
        self.cost = CostModel(rates)

    @property
    def is_pending(self) -> bool:
        return self.settles is not None

    def advance(self, *, max_queries: int) -> bool:
        assert self.may_begin.wait(timeout=60)
        self.log.append(f"{self.name} advances")
        self.num_queries.append(max_queries)
        self.num_left -= 1
        return self.num_left >= 0

    def settle(self) -> bool:
        self.log.append(f"{self.name} settles")
        if isinstance(self.settles, Exception):
            raise self.settles
        return bool(self.settles)


def run(*tasks: Answer) -> list[tuple[object, object]]:
    """Submit all before the first one begins. Returns the released ones in order, with their errors."""
    released: SimpleQueue[tuple[object, object]] = SimpleQueue()
    scheduler = Scheduler(chunk_tokens=8, on_release=lambda *found: released.put(found))
    for task in tasks:
        scheduler.submit(cast(Task, task))
    for task in tasks:
        task.may_begin.set()
    found = [released.get(timeout=60) for _ in tasks]
    scheduler.stop()
    assert released.empty()
    return found


@pytest.mark.parametrize("said", [False, RequestError("its next tokens took too much time")])
def test_an_answer_ends_in_the_quantum_of_another(said: object) -> None:
    """When its grammar has ended it, or can be followed no further: it does not wait for its next turn."""
    log: list[str] = []
    ending, other = Answer(log, "ending", said), Answer(log, "other", None, num_tokens=2)
    assert run(ending, other) == [(ending, said or None), (other, None)]
    assert log == ["ending advances", "other advances", "ending settles", *["other advances"] * 2]


def test_an_answer_that_is_not_complete_goes_on() -> None:
    """It is asked once in each quantum of others while it is not known, and keeps its turns."""
    log: list[str] = []
    slow = Answer(log, "slow", True, num_tokens=2)
    others = [Answer(log, name, None, num_tokens=1) for name in ("first", "second")]
    assert {task for task, _ in run(slow, *others)} == {slow, *others}
    assert log.count("slow advances") == 3
    assert log[:5] == ["slow advances", "first advances", "slow settles", "second advances", "slow settles"]


@pytest.mark.parametrize(("tenants", "used"), [("aaa", [64, 64, 64]), ("aba", [64, 8, 8])])
def test_prefills_are_cut_shorter_once_another_tenant_was_served(
    tenants: str, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rates of the task: 8 tokens take 8 ms here."""
    monkeypatch.setattr("kvshare.embedded.chunks._SHARED_S", 3600.0)
    released: SimpleQueue[object] = SimpleQueue()
    scheduler = Scheduler(chunk_tokens=64, on_release=lambda task, _: released.put(task))
    tasks = [Answer([], tenant, None, num_tokens=0) for tenant in tenants]
    for task in tasks:
        task.tenant, task.prefilled = task.name, False
        task.may_begin.set()
        scheduler.submit(cast(Task, task))
        assert released.get(timeout=60) is task
    scheduler.stop()
    assert [number for task in tasks for number in task.num_queries] == used
