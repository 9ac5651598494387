"""A stream of requests through vLLM with one replica: a real server, and the proxy's engine before it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from kvshare.fleet.engine import VllmEngine
from kvshare.fleet.routed_request import Incoming, RoutedRequest
from kvshare.namespace import Namespace, Owner
from kvshare.replay.policies.base import prompt_text
from kvshare.replay.requests import TokenizedRequest
from kvshare.requests import Prompt, SharingMode, SharingReport
from kvshare.vllm_protocol.messages import HEADROOM, TOKEN_VARIABLE, FinishedReport
from kvshare_lab.vllm.servers import MODEL_NAME, Server, VllmOptions, new_token, running, shared_vllm
from tests.kvshare.replay.stage import (
    BYTES_PER_TOKEN,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    Departures,
    Served,
    Stage,
    check_whole,
    decision_of,
)

OWNER = Owner("t", "tenant")


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
            evicted = departures.look(index, self.engine.sharing.tree)
            assert (finished.reason, finished.num_local) == (None, 0)
            assert finished.decision == report.decision
            served.decisions.append(decision_of(report, finished.num_computed, evicted))
            served.answers.append(list(finished.output_ids))
        check_whole(self.engine)
        return served

    async def _complete(self, one: TokenizedRequest) -> tuple[SharingReport, FinishedReport]:
        """The plan, and what vLLM reports, once all of it is stored here, and evicted over there."""
        prompt = Prompt(one.token_ids, prompt_text(one))
        routed = RoutedRequest(Incoming(OWNER, prompt, mode=SharingMode.APPROX, may_store=True))
        router = self.engine.server.router
        replica = await router.route(routed)
        assert routed.report is not None
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
        assert routed.routed.ticket is not None
        await routed.progress.reconciled.wait()
        await self.engine.settle()
        assert (await replica.control.info()).num_bytes == self.engine.sharing.tier.num_bytes
        return routed.report, await self._finished(routed.routed.ticket.ticket_id)

    async def _finished(self, ticket_id: str) -> FinishedReport:
        journal = await self.engine.fleet.replicas[0].control.journal(after=self.num_events, wait_s=0)
        self.num_events = journal.last
        (finished,) = (
            event
            for event in journal.events
            if isinstance(event, FinishedReport) and event.ticket_id == ticket_id
        )
        return finished


@asynccontextmanager
async def replica(stage: Stage, server: Server) -> AsyncIterator[Replica]:
    """The proxy's engine before a running vLLM, with an empty store: what is in it is dropped first."""
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
        await control.drop((await control.segments()).segment_ids)  # of the proxy before this one
        info = await control.info()
        assert info.num_bytes == 0
        assert (info.bytes_per_token, info.budget_bytes) == (BYTES_PER_TOKEN, stage.capacity_bytes)
        yield Replica(engine, (await control.segments()).last)
    finally:
        await engine.stop()


@contextmanager
def vllm_server(stage: Stage) -> Iterator[Server]:
    """vLLM with the connector; without a prefix cache of its own, which the other engines do not have."""
    options = VllmOptions(
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        enforce_eager=True,
    )
    kv_bytes = stage.capacity_bytes * HEADROOM // (HEADROOM - 1)
    server = shared_vllm(stage.model, stage.folder, options, kv_bytes=kv_bytes, token=new_token())
    server.command = [*server.command, "--no-enable-prefix-caching"]
    with running([server]):
        yield server
