"""The embedded engine, with a tiny model: what it shares between requests, and with whom."""

import asyncio
import gc
import weakref
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_tree import token_ids
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.model import EmbeddedModel
from kvshare.engine import (
    Delta,
    Finished,
    Started,
)
from kvshare.kv.sequence import SequenceKV
from kvshare.requests import SharingMode
from kvshare.settings import load_settings
from kvshare.telemetry import Component, EvictionCause, FallbackReason
from kvshare_lab.bench.harness import ask
from tests.kvshare.embedded.tiny_engine import (
    engine_at,
    events,
    prompt,
    report_of,
    request,
    stored,
    stream,
    tokens_of,
)
from vector_index import CircuitState


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
    engine = engine_at(tmp_path, **{"store.kv_bytes": 500 * bytes_per_token, "store.disk_bytes": 0})
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
        assert engine.status().counts.fallbacks == {(Component.STORE, FallbackReason.TOO_LARGE): 1}
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
    assert isinstance(await asyncio.wait_for(anext(running), 60), Started)
    await running.aclose()
    release.set()


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
            assert each[-1].stage_seconds.keys() >= {"plan", "fetch", "write", "recompute"}
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
    found = await asyncio.wait_for(second, 60)
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
