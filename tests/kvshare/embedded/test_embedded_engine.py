"""
The embedded engine end to end on a tiny random model: same answers with and without sharing, fair,
bounded.
"""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from delta_tree import TokenIds, token_ids
from kvshare.demo import MODEL_PATH
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.engine import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Started,
)
from kvshare.errors import (
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestError,
    ShuttingDownError,
    StoreError,
)
from kvshare.kv.sequence import SequenceKV
from kvshare.requests import SharingMode, SharingReport
from kvshare.settings import Settings, load_settings
from kvshare.telemetry import Component, EvictionCause, FallbackReason
from kvshare_lab.bench.harness import Answer, ask
from kvshare_lab.bench.random_models import tiny_model
from vector_index import CircuitState

VOCAB = 290


def prompt(length: int, seed: int = 0) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(16, VOCAB, length))


def engine_at(path: Path, *, seed: int = 0, **overrides: object) -> EmbeddedEngine:
    """A tiny Llama behind the demo model's tokenizer."""
    settings = load_settings(overrides={"store.path": str(path), "index.dense": False, **overrides})

    def load(_: Settings, stopping: threading.Event) -> tuple[EmbeddedModel, PromptEncoder]:
        return EmbeddedModel(tiny_model("llama", seed=seed), name="tiny"), PromptEncoder.load(MODEL_PATH)

    return EmbeddedEngine(settings, load=load)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = engine_at(tmp_path)
    await engine.start()
    yield engine
    await engine.stop()


async def request(
    engine: EmbeddedEngine, tokens: TokenIds, *, tenant: str = "t", **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        namespace=engine.namespace(tenant=tenant, scope="tenant"),
        prompt=await engine.encode_tokens(tokens.tolist()),
        sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling}),
    )


async def stream(engine: EmbeddedEngine, wanted: GenerationRequest) -> AsyncGenerator[Event, None]:
    """The events of a request as they come; closing it cancels the request."""
    queue: asyncio.Queue[Event | None] = asyncio.Queue()
    running = asyncio.create_task(engine.generate(wanted, queue.put_nowait))
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            yield event
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def events(engine: EmbeddedEngine, wanted: GenerationRequest) -> list[Event]:
    found = [event async for event in stream(engine, wanted)]
    await engine.settle()
    return found


def report_of(event: Event) -> SharingReport:
    assert isinstance(event, Started | Finished)
    return event.report


def tokens_of(found: list[Event]) -> list[str]:
    return [event.text for event in found if isinstance(event, Delta)]


async def stored(engine: EmbeddedEngine, tokens: TokenIds, *, max_tokens: int = 1) -> Answer:
    return await ask(engine, tokens, mode=SharingMode.APPROX, tenant="t", store=True, max_tokens=max_tokens)


async def test_an_exact_hit_gives_the_answer_of_a_full_prefill(engine: EmbeddedEngine) -> None:
    """Greedy tokens are the same, and only the last prompt token is computed."""
    tokens = prompt(200)
    wanted = await request(engine, tokens)
    first, second = await events(engine, wanted), await events(engine, wanted)
    assert tokens_of(first) == tokens_of(second)
    report = report_of(second[0])
    assert (report.num_exact, report.num_repaired, report.decision) == (199, 1, "exact")


async def test_what_a_prompt_is_stored_as_is_known_after_the_answer(engine: EmbeddedEngine) -> None:
    """The first event has an object for it, which the engine updates when everything is stored."""
    running = stream(engine, await request(engine, prompt(200)))
    started = await anext(running)
    assert isinstance(started, Started)
    assert (started.stored.node, started.stored.is_settled) == (None, False)
    assert [event async for event in running]
    await engine.settle()
    (node,) = engine.sharing.tree.nodes()
    assert (started.stored.node, started.stored.is_settled) == (node.node_id, True)


async def test_the_next_turn_of_a_chat_is_an_exact_prefix(engine: EmbeddedEngine) -> None:
    """KV of generated tokens is kept: prompt + answer + more finds all but the last generated token."""
    tokens = prompt(100)
    generated: list[int] = []
    async for event in stream(engine, await request(engine, tokens, logprobs=0)):
        if isinstance(event, Delta):
            generated += [entry.token_id for entry in event.logprobs]
    assert len(generated) == 8
    turn = token_ids(np.concatenate([tokens, np.asarray(generated), prompt(30, seed=1)]))
    found = await events(engine, await request(engine, turn))
    assert report_of(found[0]).num_exact == 107
    assert report_of(found[0]).num_recomputed == 31


async def test_an_edited_prompt_is_answered_from_the_donors_kv(engine: EmbeddedEngine) -> None:
    """Tokens by source add up to the prompt, and the plan covers what is equal."""
    tokens = prompt(400)
    await stored(engine, tokens)
    recipient = np.array(tokens)
    recipient[150:158] = prompt(8, seed=9)
    answer = await ask(engine, token_ids(recipient), mode=SharingMode.APPROX, tenant="t")
    assert answer.report is not None
    assert answer.report.decision == "approx"
    assert answer.report.num_exact == 150
    assert answer.report.num_recomputed == 8
    assert answer.report.num_copied > 150
    assert answer.report.num_prompt_tokens == 400


async def test_modes_limit_what_is_accepted(engine: EmbeddedEngine) -> None:
    """`exact` takes prefixes only, `off` nothing at all."""
    tokens = prompt(300)
    await stored(engine, tokens)
    recipient = np.array(tokens)
    recipient[100:104] = prompt(4, seed=9)
    exact = await ask(engine, token_ids(recipient), mode=SharingMode.EXACT, tenant="t")
    off = await ask(engine, token_ids(recipient), mode=SharingMode.OFF, tenant="t")
    assert exact.report is not None
    assert off.report is not None
    assert (exact.report.num_exact, exact.report.num_copied) == (100, 0)
    assert (off.report.num_cached, off.report.reason) == (0, "off")
    assert exact.text == off.text


async def test_a_prompt_is_found_by_the_very_next_request(engine: EmbeddedEngine) -> None:
    """Storing happens after the answer, yet who asks again at once finds it."""
    tokens = prompt(200)
    for expected in (0, 199):
        running = stream(engine, await request(engine, tokens))
        report = next(e.report for e in [event async for event in running] if isinstance(e, Started))
        assert report.num_exact == expected


async def test_another_tenant_gets_nothing(engine: EmbeddedEngine) -> None:
    """The same prompt of another tenant is computed in full."""
    tokens = prompt(200)
    await stored(engine, tokens)
    foreign = await ask(engine, tokens, mode=SharingMode.APPROX, tenant="other")
    own = await ask(engine, tokens, mode=SharingMode.APPROX, tenant="t")
    assert foreign.report is not None
    assert own.report is not None
    assert foreign.report.num_cached == 0
    assert own.report.num_cached == 199


async def test_requests_that_must_not_be_stored_leave_nothing(engine: EmbeddedEngine) -> None:
    """store=False keeps no node, no segment, no byte."""
    await ask(engine, prompt(200), mode=SharingMode.APPROX, store=False)
    status = engine.status()
    assert (status.num_nodes, status.num_segments, status.kv_bytes) == (0, 0, 0)


async def test_storing_stays_within_the_budget(tmp_path: Path) -> None:
    """Least recently used prompts go; the tree's bytes are the tier's bytes."""
    bytes_per_token = 2 * 3 * 2 * 16 * 4
    engine = engine_at(tmp_path, **{"store.kv_bytes": 500 * bytes_per_token})
    await engine.start()
    try:
        for seed in range(6):
            await stored(engine, prompt(120, seed=seed))
        status = engine.status()
        assert status.num_nodes == 4
        assert status.kv_bytes <= 500 * bytes_per_token
        assert status.kv_bytes == engine.sharing.tree.stats().num_bytes
        assert status.counts.evictions == {EvictionCause.CAPACITY: 2}
        newest = await ask(engine, prompt(120, seed=5), mode=SharingMode.APPROX, tenant="t")
        oldest = await ask(engine, prompt(120, seed=0), mode=SharingMode.APPROX, tenant="t")
        assert newest.report is not None
        assert oldest.report is not None
        assert (newest.report.num_exact, oldest.report.num_exact) == (119, 0)
        await stored(engine, prompt(600, seed=9))
        assert engine.status().kv_bytes <= 500 * bytes_per_token
        assert engine.status().counts.fallbacks == {(Component.COMMIT, FallbackReason.TOO_LARGE): 1}
    finally:
        await engine.stop()


async def test_its_status_has_what_operators_watch(engine: EmbeddedEngine) -> None:
    """Tokens are counted as they are emitted, also of a stream that is closed early."""
    found = await events(engine, await request(engine, prompt(60), n=2))
    assert engine.status().counts.num_generated_tokens == len(tokens_of(found)) == 16
    async with aclosing(stream(engine, await request(engine, prompt(60), max_tokens=100))) as broken_off:
        async for event in broken_off:
            if isinstance(event, Delta):
                break
    await engine.settle()
    status = engine.status()
    assert 16 < status.counts.num_generated_tokens < 116
    assert status.num_embedding == 0
    assert status.index is not None
    assert set(status.index.circuits.values()) == {CircuitState.CLOSED}
    assert status.index.num_foreign_hits == 0
    assert status.index.store_bytes is not None
    assert (
        0 < status.index.store_bytes < 2**30
    )  # the sparse files of the index are larger than what they take


async def test_sampling_is_reproducible_by_seed_and_choices_differ(engine: EmbeddedEngine) -> None:
    """The same seed gives the same n choices; the choices themselves are different draws."""
    wanted = await request(engine, prompt(60), temperature=1.5, seed=7, n=3)
    runs = [await events(engine, wanted) for _ in range(2)]
    texts = [
        ["".join(e.text for e in run if isinstance(e, Delta) and e.choice == k) for k in range(3)]
        for run in runs
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert isinstance(runs[0][-1], Finished)
    assert runs[0][-1].num_completion_tokens == sum(isinstance(e, Delta) for e in runs[0])


async def test_logit_bias_stop_and_length_end_a_choice(engine: EmbeddedEngine) -> None:
    """A forced token repeats until the limit; as a stop string it is not shown; as EOS it ends the answer."""
    letter = engine.server.encoder.backend.encode("a", add_special_tokens=False).ids[0]
    forced: dict[str, Any] = {"logit_bias": {letter: 100.0}}
    limited = await events(engine, await request(engine, prompt(50), **forced))
    assert "".join(tokens_of(limited)) == "a" * 8
    assert [e.finish_reason for e in limited if isinstance(e, Delta)][-1] is FinishReason.LENGTH
    stopped = await events(engine, await request(engine, prompt(50), stop=("aaa",), **forced))
    assert "".join(tokens_of(stopped)) == ""
    assert [e.finish_reason for e in stopped if isinstance(e, Delta)][-1] is FinishReason.STOP
    partial = await events(engine, await request(engine, prompt(50), stop=("aab",), max_tokens=4, **forced))
    assert "".join(tokens_of(partial)) == "aaaa"
    eos = min(engine.server.eos_token_ids)
    ended = await events(engine, await request(engine, prompt(50), logit_bias={eos: 100.0}))
    assert [e.num_tokens for e in ended if isinstance(e, Delta)] == [1]


async def test_logprobs_are_those_of_the_plain_model(engine: EmbeddedEngine) -> None:
    """The first token's log-probability is the untouched model's."""
    tokens = prompt(80)
    found = await events(engine, await request(engine, tokens, logprobs=3, max_tokens=1))
    entry = next(e for e in found if isinstance(e, Delta)).logprobs[0]
    model = tiny_model("llama")
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    expected, order = logits.log_softmax(-1).topk(3)
    assert entry.logprob == pytest.approx(float(expected[0]), abs=1e-4)
    assert [top.token_id for top in entry.top] == order.tolist()


async def test_streams_interleave(engine: EmbeddedEngine) -> None:
    """A second request gets tokens while the first still decodes."""
    order: list[str] = []

    async def follow(name: str, wanted: GenerationRequest) -> None:
        async for event in stream(engine, wanted):
            if isinstance(event, Delta):
                order.append(name)

    wanted = [await request(engine, prompt(60, seed=k), max_tokens=40) for k in range(2)]
    await asyncio.gather(follow("a", wanted[0]), follow("b", wanted[1]))
    switches = sum(left != right for left, right in pairwise(order))
    assert switches >= 20


async def test_a_closed_stream_frees_its_slot_at_once(tmp_path: Path) -> None:
    """With one slot, a waiting request starts when the running one is closed; its prefill is kept."""
    engine = engine_at(tmp_path, **{"engine.max_running": 1})
    await engine.start()
    try:
        running = stream(engine, await request(engine, prompt(60), max_tokens=900))
        assert isinstance(await anext(running), Started)
        assert isinstance(await anext(running), Delta)
        waiting = asyncio.create_task(events(engine, await request(engine, prompt(60, seed=1))))
        await asyncio.sleep(0.05)
        assert engine.status().num_waiting == 1
        await running.aclose()
        assert isinstance((await asyncio.wait_for(waiting, timeout=10))[-1], Finished)
        assert engine.status().num_running == 0
        again = await events(engine, await request(engine, prompt(60)))
        assert report_of(again[0]).num_exact == 59
    finally:
        await engine.stop()


async def test_a_full_queue_is_refused(tmp_path: Path) -> None:
    """One runs, none may wait: the second request is told so before it starts."""
    engine = engine_at(tmp_path, **{"engine.max_running": 1, "engine.max_waiting": 0})
    await engine.start()
    try:
        running = stream(engine, await request(engine, prompt(60), max_tokens=900))
        await anext(running)
        with pytest.raises(OverloadedError):
            await anext(stream(engine, await request(engine, prompt(60, seed=1))))
        await running.aclose()
    finally:
        await engine.stop()


async def test_prompts_that_do_not_fit_are_refused_before_they_start(engine: EmbeddedEngine) -> None:
    """Prompt and completion must fit the context; an empty prompt is no prompt."""
    with pytest.raises(ContextLengthError) as caught:
        await events(engine, await request(engine, prompt(1020), max_tokens=100))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ContextLengthError):
        await events(engine, await request(engine, prompt(1024), max_tokens=None))
    with pytest.raises(RequestError):
        await events(engine, await request(engine, prompt(0)))
    with pytest.raises(RequestError, match="vocabulary"):
        await engine.encode_tokens([10**6])
    assert engine.status().num_nodes == 0


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes take seconds to tokenize; that they are too long can be seen from their length."""
    monkeypatch.setattr(engine.server.encoder, "_tokenizer", None)  # whoever tokenizes, fails otherwise
    with pytest.raises(ContextLengthError):
        await engine.encode_text("word " * 1_000_000)


async def test_a_restart_forgets_prompts_whose_kv_is_gone(tmp_path: Path) -> None:
    """KV dies with the process; the metadata that pointed to it leaves at the next start."""
    engine = engine_at(tmp_path)
    await engine.start()
    await stored(engine, prompt(200))
    assert engine.status().num_nodes == 1
    await engine.stop()
    again = engine_at(tmp_path)
    await again.start()
    try:
        assert again.status().num_nodes == 0
        answer = await stored(again, prompt(200))
        assert answer.report is not None
        assert answer.report.num_cached == 0
    finally:
        await again.stop()


async def test_the_store_of_another_model_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Never wrong KV, and never no server: the other model begins a store of its own."""
    first = engine_at(tmp_path)
    await first.start()
    await stored(first, prompt(200))
    await first.stop()
    other = engine_at(tmp_path, seed=1)
    await other.start()
    answer = await stored(other, prompt(200))
    assert answer.report is not None
    assert answer.report.num_cached == 0
    await other.stop()
    assert (tmp_path / "tree.sqlite3.old").exists()
    assert "another model" in caplog.text


async def test_a_store_in_use_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Two servers on one store are a mistake; whoever makes it does not wait for the weights."""
    first = engine_at(tmp_path)
    await first.start()
    second = engine_at(tmp_path)

    def fail(_: Settings, stopping: threading.Event) -> NoReturn:
        raise AssertionError("the model was loaded")

    second._load = fail
    with pytest.raises(StoreError, match="another process has this store open"):
        await second.start()
    await first.stop()


async def test_no_store_at_all_shares_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`store.path: null`: nothing in the working directory, and a temporary index that goes at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    no_store: dict[str, Any] = {"store.path": None}
    engine = engine_at(tmp_path, **no_store)
    await engine.start()
    assert list((tmp_path / "temporary").glob("kvshare-index-*"))
    await stored(engine, prompt(200))
    answer = await stored(engine, prompt(200))
    assert answer.report is not None
    assert answer.report.num_cached == 199
    await engine.stop()
    assert [folder for folder, _, _ in os.walk(tmp_path)] == [str(tmp_path), str(tmp_path / "temporary")]


async def test_a_start_that_fails_leaves_the_store_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was opened is closed again, so that the next start in this process works."""
    broken = engine_at(tmp_path)

    def fail(model: EmbeddedModel) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvshare.embedded.server._warm_up", fail)  # the last step of a start
        with pytest.raises(RuntimeError, match="out of memory"):
            await broken.start()
    again = engine_at(tmp_path)
    await again.start()
    await again.stop()


async def test_requests_that_share_nothing_do_not_wait_for_commits(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a short prompt nor mode off has anything to find."""
    monkeypatch.setattr("kvshare.embedded.engine._SETTLE_S", 3600.0)
    release = asyncio.Event()

    async def commit() -> None:
        await release.wait()

    namespace = engine.namespace(tenant="t", scope="tenant").digest
    engine.server.runtime.background.spawn(commit(), namespace=namespace)
    running = stream(engine, replace(await request(engine, prompt(60)), mode=SharingMode.OFF))
    assert isinstance(await asyncio.wait_for(anext(running), timeout=60), Started)
    await running.aclose()
    release.set()


async def test_stopping_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    """Nobody hangs: running requests fail, waiting ones are told that the engine stops."""
    engine = engine_at(tmp_path, **{"engine.max_running": 1})
    await engine.start()
    running = stream(engine, await request(engine, prompt(60), max_tokens=900))
    await anext(running)
    await anext(running)
    waiting = asyncio.create_task(events(engine, await request(engine, prompt(60, seed=1))))
    await asyncio.sleep(0.05)
    await engine.stop()
    with pytest.raises(EngineError):
        async for _ in running:
            pass
    with pytest.raises(ShuttingDownError):
        await asyncio.wait_for(waiting, timeout=10)


async def test_repairs_that_are_chosen_are_counted_and_stored(tmp_path: Path) -> None:
    """
    As many tokens are repaired as was planned and predicted for. The prompt is stored with its repairs, exact
    as far as the copies that the probe pass attended to.
    """
    for rule in ("windows", "attention"):
        changed: dict[str, Any] = {"repair.rule": rule}
        engine = engine_at(tmp_path / rule, **changed)
        await engine.start()
        donor = prompt(200)
        edited = token_ids(np.concatenate([donor[:60], prompt(10, seed=5), donor[70:]]))
        await stored(engine, donor)
        answer = await stored(engine, edited)
        predicted = answer.report.prediction
        assert predicted is not None
        assert (answer.report.decision, predicted.rule) == ("approx", rule)
        assert answer.report.num_repaired == predicted.repaired + load_settings().repair.tail
        node = engine.sharing.tree.find(engine.namespace(tenant="t", scope="tenant").digest, edited)
        assert node is not None
        assert node.exact_length == (70 if rule == "attention" else 70 + predicted.repaired)
        assert node.deviation == predicted.expected
        await engine.stop()


async def test_near_duplicates_at_once_are_computed_once(engine: EmbeddedEngine) -> None:
    """The scene KVShare is for: one is computed, the others wait for it and copy. Answers are its own."""
    base = prompt(400)
    forms = []
    for number in range(6):
        tokens = np.array(base)
        tokens[30:34] = 40 + number
        forms.append(token_ids(tokens))
    wanted = [await request(engine, tokens, max_tokens=4) for tokens in forms]
    found = await asyncio.gather(*(events(engine, each) for each in wanted))
    reports = [report_of(each[-1]) for each in found]
    assert sorted(report.decision for report in reports) == ["approx"] * 5 + ["full"]
    for report, each in zip(reports, found, strict=True):
        assert isinstance(each[-1], Finished)
        if report.decision == "approx":
            assert report.num_copied > 200
            assert each[-1].stage_seconds["wait"] > 0
    assert engine.status().num_nodes == 6


async def test_a_prompt_is_a_donor_while_its_answer_is_generated(engine: EmbeddedEngine) -> None:
    """And the answer's KV follows: the next turn finds it."""
    tokens = prompt(300)
    first = stream(engine, await request(engine, tokens, max_tokens=120))
    seen = [await anext(first), await anext(first)]
    assert isinstance(seen[1], Delta)  # its first token
    second = await ask(engine, tokens, mode=SharingMode.APPROX, tenant="t", store=False)
    assert second.report.num_exact == 299
    rest = [event async for event in first]
    num_generated = 1 + sum(isinstance(event, Delta) for event in rest)
    assert num_generated > 20  # it was far from its end
    await engine.settle()
    (node,) = engine.sharing.tree.nodes()
    assert node.num_tokens == 300 + num_generated - 1
    assert node.exact_length == node.num_tokens
    assert engine.status().kv_bytes == engine.sharing.tree.stats().num_bytes


async def test_who_waits_goes_on_when_the_other_goes_away(engine: EmbeddedEngine) -> None:
    base = prompt(500)
    other = np.array(base)
    other[40:44] = 50
    first = asyncio.create_task(events(engine, await request(engine, base, max_tokens=50)))
    second = asyncio.create_task(events(engine, await request(engine, token_ids(other), max_tokens=2)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    found = await asyncio.wait_for(second, 10)
    assert isinstance(found[-1], Finished)
    assert len(engine._arrivals) == 0


async def test_the_kv_of_an_ended_request_goes_without_a_collection(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server collects rarely, and tensors do not make it collect."""
    alive: weakref.WeakSet[SequenceKV] = weakref.WeakSet()
    new_sequence = EmbeddedModel.new_sequence

    def noted(self: EmbeddedModel, capacity: int) -> SequenceKV:
        kv = new_sequence(self, capacity)
        alive.add(kv)
        return kv

    monkeypatch.setattr(EmbeddedModel, "new_sequence", noted)
    gc.collect()
    gc.disable()
    try:
        for seed in range(5):
            await stored(engine, prompt(60, seed=seed), max_tokens=4)
        await asyncio.sleep(0.05)
        assert len(alive) <= 1  # the worker's last
    finally:
        gc.enable()
