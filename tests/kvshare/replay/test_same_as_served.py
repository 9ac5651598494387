"""
A replay decides what the server decides: the embedded engine answers a stream, which is then replayed.

One request at a time, each after the last one is stored and indexed; rates fixed; a store that must evict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.bench.random_models import VOCAB_SIZE
from kvshare.demo import MODEL_PATH
from kvshare.engines.base import Delta, Event, Finished, GenerationRequest, SamplingParams
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.replay.arms.base import Workbench
from kvshare.replay.arms.sharing import SharingArm
from kvshare.replay.arms.sharing_options import SharingOptions
from kvshare.replay.workloads import generate
from kvshare.requests import SharingReport
from kvshare.settings import Settings, load_settings
from tests.kvshare.engines.test_embedded_engine import engine_at
from tests.kvshare.replay.synthetic import request

NUM_REQUESTS = 75  # of each workload
CAPACITY_TOKENS = {"agent": 2_000, "rag": 12_000, "template": 5_000, "window": 12_000}  # each must evict
PREFILL_TOKENS_PER_S = 1000.0
MAX_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request came to, and which earlier ones left the store for it."""

    exact: int
    copied: int
    repaired: int
    evicted: frozenset[int]


def prompts(workload: str) -> Iterator[TokenIds]:
    """The workload's prompts, in as many tokens as the tiny model knows."""
    encoder = PromptEncoder.load(MODEL_PATH)
    for row in generate(workload, num_requests=NUM_REQUESTS, seed=1):
        ids = encoder.encode_chat(row.draft.messages).token_ids[:1000]
        yield token_ids((16 + ids % (VOCAB_SIZE - 20)).astype(np.int32))


def overrides(num_bytes: int) -> dict[str, object]:
    return {
        "store.kv_bytes": num_bytes,
        "cost.prior_prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
        "cost.smoothing": 1e-12,  # rates as good as fixed
        "index.search_timeout_s": 60.0,
        "index.max_candidates": 8,
    }


async def serve(engine: EmbeddedEngine, tokens: TokenIds) -> tuple[SharingReport, list[int]]:
    """The report of one greedy request, and the generated tokens whose KV was computed."""
    asked = GenerationRequest(
        request_id="r",
        namespace=engine.namespace(tenant="t", scope="tenant"),
        prompt=await engine.encode_tokens(tokens.tolist()),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=0),
    )
    events: list[Event] = []
    await engine.generate(asked, events.append)
    await engine.settle()
    (finished,) = (event for event in events if isinstance(event, Finished))
    answer = [one.token_id for event in events if isinstance(event, Delta) for one in event.logprobs]
    return finished.report, answer[:-1]  # the last token is never an input


class Departures:
    """Which requests' prompts have left a tree since the last look; node ids differ from run to run."""

    def __init__(self) -> None:
        self._alive: dict[int, int] = {}

    def look(self, index: int, node_ids: Sequence[int]) -> frozenset[int]:
        gone = [node_id for node_id in self._alive if node_id not in set(node_ids)]
        left = frozenset(self._alive.pop(node_id) for node_id in gone)
        for node_id in node_ids:
            self._alive.setdefault(node_id, index)
        return left


async def served(
    engine: EmbeddedEngine, stream: Sequence[TokenIds]
) -> tuple[list[Decision], list[list[int]]]:
    decisions, answers, departures = [], [], Departures()
    for index, tokens in enumerate(stream):
        report, answer = await serve(engine, tokens)
        evicted = departures.look(index, [int(node.node_id) for node in engine.sharing.tree.nodes()])
        decisions.append(Decision(report.num_exact, report.num_copied, report.num_repaired, evicted))
        answers.append(answer)
    return decisions, answers


def replayed(
    settings: Settings,
    stream: Sequence[TokenIds],
    answers: Sequence[list[int]],
    *,
    namespace: str,
    capacity: int,
    bytes_per_token: int,
) -> list[Decision]:
    bench = Workbench(
        settings=settings, bytes_per_token=bytes_per_token, prefill_tokens_per_s=PREFILL_TOKENS_PER_S
    )
    arm = SharingArm("kvshare", bench, capacity, sharing=SharingOptions(nominate="fingerprints"))
    decisions, departures = [], Departures()
    try:
        for index, (tokens, answer) in enumerate(zip(stream, answers, strict=True)):
            outcome = arm.observe(request(index, tokens.tolist(), answer=answer, namespace=namespace))
            evicted = departures.look(index, arm.node_ids)
            copied = outcome.num_hit - outcome.num_exact
            decisions.append(Decision(outcome.num_exact, copied, outcome.num_repaired, evicted))
    finally:
        arm.close()
    return decisions


@pytest.mark.slow
@pytest.mark.parametrize("workload", sorted(CAPACITY_TOKENS))
async def test_a_replay_decides_what_the_engine_decides(workload: str, tmp_path: Path) -> None:
    """Exact, copied and repaired tokens and evictions are equal, request by request."""
    stream = list(prompts(workload))
    probe = engine_at(tmp_path / "probe")
    await probe.start()
    bytes_per_token = probe.model.geometry.bytes_per_token
    await probe.stop()
    capacity = CAPACITY_TOKENS[workload]
    changes = overrides(capacity * bytes_per_token)
    engine = engine_at(tmp_path / "store", **changes)
    await engine.start()
    try:
        namespace = engine.namespace(tenant="t", scope="tenant").digest  # it salts the index's digests
        expected, answers = await served(engine, stream)
    finally:
        await engine.stop()
    settings = load_settings(overrides=changes)
    # In a thread: an arm has an event loop of its own.
    found = await asyncio.to_thread(
        replayed,
        settings,
        stream,
        answers,
        namespace=namespace,
        capacity=capacity,
        bytes_per_token=bytes_per_token,
    )
    assert found == expected
    assert sum(decision.copied > 0 for decision in expected) >= 25
    assert sum(len(decision.evicted) for decision in expected) >= 25
