"""
One stream of requests through a server and through a replay: what was decided, request by request.

Requests come one at a time, each after the one before is stored, indexed and embedded; rates are fixed. All
get the same tokens, the same text for the embedder, and one namespace, which salts the index's digests.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvshare.bench.vllm.models import write_small_model
from kvshare.bench.vllm.servers import MODEL_NAME, Server, VllmOptions, new_token, running, shared_vllm
from kvshare.demo import MODEL_PATH
from kvshare.engines.base import Delta, Event, GenerationRequest, SamplingParams
from kvshare.engines.base import Finished as Answered
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.fleet.engine import VllmEngine
from kvshare.fleet.in_flight import RoutedRequest
from kvshare.namespace import Namespace, Owner
from kvshare.replay.arms import Meanings, Workbench
from kvshare.replay.arms.meanings import prompt_text
from kvshare.replay.arms.sharing import SharingArm
from kvshare.replay.arms.sharing_options import SharingOptions
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from kvshare.requests import Prompt, SharingMode, SharingReport
from kvshare.settings import Settings, load_settings
from kvshare.vllm_protocol.messages import HEADROOM, TOKEN_VARIABLE, Finished
from tests.kvshare.replay.synthetic import request as logged_request
from vector_index import TextEmbedder

PREFILL_TOKENS_PER_S = 1000.0
MAX_TOKENS = 3  # of an answer
OWNER = Owner("t", "tenant")
LOCAL = Namespace("t", "tenant", "small", "0", "demo", "float32", "4x2x64", "plain")  # without a replica
_BYTES_PER_TOKEN = 4096  # of `write_small_model` in float32
_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request came to, and which earlier ones left the store for it."""

    decision: str
    exact: int
    copied: int
    repaired: int
    computed: int  # the repaired ones among them
    evicted: frozenset[int]


@dataclass(slots=True)
class Served:
    """A stream as one server served it. `answers`: the generated tokens whose KV was computed."""

    decisions: list[Decision] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stage:
    """
    What all of them run on: one model, one capacity. `embedder` None: no search by embedding.

    The capacity is a multiple of 7 tokens, so that vLLM's, with its headroom, is whole.
    """

    folder: Path
    capacity_tokens: int
    embedder: TextEmbedder | None = None

    @property
    def model(self) -> Path:
        folder = self.folder / "model"
        if not folder.exists():
            write_small_model(folder, dtype="float32", max_model_len=_MAX_MODEL_LEN)
        return folder

    @property
    def capacity_bytes(self) -> int:
        return self.capacity_tokens * _BYTES_PER_TOKEN

    def settings(self, name: str, **more: object) -> Settings:
        return load_settings(
            overrides={
                "store.path": str(self.folder / name),
                "store.kv_bytes": self.capacity_bytes,
                "model.path": str(self.model),
                "model.dtype": "float32",
                "cost.prior_prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
                "cost.smoothing": 1e-12,  # rates as good as fixed
                "index.dense": self.embedder is not None,
                "index.dense_min_tokens": 64,  # also where tokens found something
                "index.dense_min_prefill_s": 0.0,
                "index.dense_min_uncovered": 0.1,
                "index.search_timeout_s": 60.0,
                "index.embed_timeout_s": 60.0,
                **more,
            }
        )

    @contextmanager
    def embedding(self) -> Iterator[None]:
        """Servers that start meanwhile embed with this stage's embedder."""
        with patch("kvshare.index_factory._load_embedder", lambda settings: self.embedder):
            yield


class Departures:
    """Which requests' prompts have left a tree since the last look; node ids differ from run to run."""

    def __init__(self) -> None:
        self._alive: dict[int, int] = {}

    def look(self, index: int, node_ids: Sequence[int]) -> frozenset[int]:
        """The node that is new belongs to request `index`."""
        gone = [node_id for node_id in self._alive if node_id not in set(node_ids)]
        left = frozenset(self._alive.pop(node_id) for node_id in gone)
        for node_id in node_ids:
            self._alive.setdefault(node_id, index)
        return left


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same stream, served and replayed with that server's answers."""

    served: Served
    replayed: list[Decision]
    num_embedded: int  # requests that were searched for by embedding

    @property
    def num_different(self) -> int:
        return sum(a != b for a, b in zip(self.served.decisions, self.replayed, strict=True))


def stream(paths: Sequence[Path], *, num_requests: int, max_tokens: int) -> list[TokenizedRequest]:
    """As many requests of each log, one of each in turn; longer prompts are cut."""
    tokenizer = RequestTokenizer.load(MODEL_PATH)
    logs = []
    for path in paths:
        with RequestStream([path]) as log:
            logs.append(list(tokenizer.tokenize(islice(log, num_requests // len(paths)))))
    mixed = [one for turn in zip(*logs, strict=True) for one in turn]
    return [replace(one, token_ids=one.token_ids[:max_tokens]) for one in mixed]


async def compared(
    stage: Stage, requests: Sequence[TokenizedRequest], *, vllm: bool
) -> dict[str, Comparison]:
    """By engine. All of them share one namespace: with vLLM, its replica's."""
    namespace, served = LOCAL, {}
    if vllm:
        with vllm_server(stage) as server:
            async with replica(stage, server) as shared:
                namespace = shared.namespace
                served["vllm"] = await shared.serve(requests)
    served["embedded"] = await embedded(stage, requests, namespace)
    return {
        # In a thread: an arm has an event loop of its own.
        name: Comparison(one, *await asyncio.to_thread(replayed, stage, requests, one, namespace.digest))
        for name, one in served.items()
    }


def summary(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Totals of a stream, JSON-ready."""
    return {
        "decisions": dict(Counter(one.decision for one in decisions)),
        "evictions": sum(len(one.evicted) for one in decisions),
        "tokens": {
            name: sum(getattr(one, name) for one in decisions)
            for name in ("exact", "copied", "repaired", "computed")
        },
    }


def replayed(
    stage: Stage, requests: Sequence[TokenizedRequest], served: Served, namespace: str
) -> tuple[list[Decision], int]:
    """What a replay decides, with a server's answers as the log's; how often it searched by embedding."""
    bench = Workbench(
        settings=stage.settings("replay"),
        bytes_per_token=_BYTES_PER_TOKEN,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        meanings=None if stage.embedder is None else Meanings(stage.embedder),
        explain_losses=False,
    )
    options = SharingOptions(nominate="fingerprints" if stage.embedder is None else "both")
    arm = SharingArm("kvshare", bench, stage.capacity_tokens, sharing=options)
    decisions, num_embedded, departures = [], 0, Departures()
    try:
        for index, (one, answer) in enumerate(zip(requests, served.answers, strict=True)):
            outcome = arm.observe(
                logged_request(
                    index, one.token_ids.tolist(), answer=answer, namespace=namespace, text=one.text
                )
            )
            num_embedded += bool(outcome.details["embedded"])
            copied = outcome.num_hit - outcome.num_exact
            decisions.append(
                Decision(
                    "approx" if copied else "exact" if outcome.num_exact else "full",
                    outcome.num_exact,
                    copied,
                    outcome.num_repaired,
                    one.num_tokens - outcome.num_hit,
                    departures.look(index, arm.node_ids),
                )
            )
    finally:
        arm.close()
    return decisions, num_embedded


async def embedded(stage: Stage, requests: Sequence[TokenizedRequest], namespace: Namespace) -> Served:
    """The stream through the embedded engine."""
    served, departures = Served(), Departures()
    engine = EmbeddedEngine.from_settings(stage.settings("embedded"))
    with stage.embedding():
        await engine.start()
    try:
        assert engine.model.geometry.bytes_per_token == _BYTES_PER_TOKEN
        for index, one in enumerate(requests):
            report, answer = await _generate(engine, one, namespace)
            evicted = departures.look(index, _node_ids(engine))
            num_computed = report.num_recomputed + report.num_repaired
            served.decisions.append(_decision(report, num_computed, evicted))
            served.answers.append(answer)
        _check_whole(engine)
    finally:
        await engine.stop()
    return served


async def _generate(
    engine: EmbeddedEngine, one: TokenizedRequest, namespace: Namespace
) -> tuple[SharingReport, list[int]]:
    asked = GenerationRequest(
        request_id="r",
        namespace=namespace,
        prompt=Prompt(one.token_ids, prompt_text(one)),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=0),
    )
    events: list[Event] = []
    await engine.generate(asked, events.append)
    await engine.settle()
    (finished,) = (event for event in events if isinstance(event, Answered))
    answer = [token.token_id for event in events if isinstance(event, Delta) for token in event.logprobs]
    return finished.report, answer[:-1]  # the last token is never an input


@dataclass(slots=True)
class Replica:
    """A running vLLM, and the proxy's engine before it."""

    engine: VllmEngine
    num_events: int = 0  # of its journal, that were read

    @property
    def namespace(self) -> Namespace:
        return self.engine.fleet.replicas[0].namespace(OWNER)

    async def serve(self, requests: Sequence[TokenizedRequest]) -> Served:
        """The stream through it. What vLLM reports must be what was planned."""
        served, departures = Served(), Departures()
        for index, one in enumerate(requests):
            report, finished = await self._complete(one)
            evicted = departures.look(index, _node_ids(self.engine))
            assert (finished.reason, finished.num_local) == (None, 0)
            assert finished.decision == report.decision
            served.decisions.append(_decision(report, finished.num_computed, evicted))
            served.answers.append(list(finished.output_ids))
        _check_whole(self.engine)
        return served

    async def _complete(self, one: TokenizedRequest) -> tuple[SharingReport, Finished]:
        """The plan, and what vLLM reports; returns when all of it is stored, and evicted over there, too."""
        prompt = Prompt(one.token_ids, prompt_text(one))
        routed = RoutedRequest(OWNER, prompt, mode=SharingMode.APPROX, may_store=True)
        router = self.engine.server.router
        replica = await router.route(routed)
        assert routed.report is not None
        assert routed.ticket is not None
        body = {
            "model": MODEL_NAME,
            "prompt": one.token_ids.tolist(),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "cache_salt": routed.salt,
            "kv_transfer_params": routed.transfer_params,
        }
        with router.sending(routed, replica):
            response = await replica.vllm.send(
                "POST",
                "/v1/completions",
                headers={"Content-Type": "application/json"},
                body=json.dumps(body).encode(),
            )
            text = await response.text()
            assert response.status == 200, text
        await routed.reconciled.wait()
        await self.engine.settle()
        assert (await replica.control.info()).num_bytes == self.engine.sharing.tier.num_bytes
        return routed.report, await self._finished(routed.ticket.request_id)

    async def _finished(self, request_id: str) -> Finished:
        journal = await self.engine.fleet.replicas[0].control.journal(after=self.num_events, wait_s=0)
        self.num_events = journal.last
        (finished,) = (
            event
            for event in journal.events
            if isinstance(event, Finished) and event.request_id == request_id
        )
        return finished


@asynccontextmanager
async def replica(stage: Stage, server: Server) -> AsyncIterator[Replica]:
    """The proxy's engine before a running vLLM, with an empty store."""
    ends = {"url": server.url, "control_url": server.control_url}
    with patch.dict(os.environ, {TOKEN_VARIABLE: server.environment[TOKEN_VARIABLE]}):
        engine = VllmEngine(stage.settings("vllm", **{"vllm.replicas": [ends]}))
    with stage.embedding():
        await engine.start()
    try:
        for watcher in engine.server.watchers:
            await asyncio.wait_for(watcher.was_connected.wait(), timeout=60.0)
        await engine.settle()
        control = engine.fleet.replicas[0].control
        info = await control.info()
        assert (info.bytes_per_token, info.budget_bytes) == (_BYTES_PER_TOKEN, stage.capacity_bytes)
        yield Replica(engine, (await control.segments()).last)
    finally:
        await engine.stop()


@contextmanager
def vllm_server(stage: Stage) -> Iterator[Server]:
    """vLLM with the connector; without a prefix cache of its own, which the other engines do not have."""
    options = VllmOptions(
        dtype="float32",
        max_model_len=_MAX_MODEL_LEN,
        max_num_batched_tokens=_MAX_MODEL_LEN,
        enforce_eager=True,
    )
    kv_bytes = stage.capacity_bytes * HEADROOM // (HEADROOM - 1)
    server = shared_vllm(stage.model, stage.folder, options, kv_bytes=kv_bytes, token=new_token())
    server.command = [*server.command, "--no-enable-prefix-caching"]
    with running([server]):
        yield server


def _node_ids(engine: EmbeddedEngine | VllmEngine) -> list[int]:
    return [int(node.node_id) for node in engine.sharing.tree.nodes()]


def _check_whole(engine: EmbeddedEngine | VllmEngine) -> None:
    """Nothing was given up, such as a search that took too long on a busy machine."""
    counters = engine.status().counters
    assert not {name: number for name, number in counters.items() if number and "fallback" in name}


def _decision(report: SharingReport, num_computed: int, evicted: frozenset[int]) -> Decision:
    return Decision(
        report.decision, report.num_exact, report.num_copied, report.num_repaired, num_computed, evicted
    )
