"""The real front in front of fake vLLM replicas, and what tests ask of it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
from aiohttp import web

from kvshare.fleet.engine import VllmEngine
from kvshare.namespace import Owner
from kvshare.telemetry import Counts
from kvshare.vllm_protocol.salts import owner_salt
from proxy.app import build_app
from proxy.connection import FrontRunner
from proxy.context import SERVER
from proxy.lifecycle import Lifecycle
from tests.fake_vllm import MODEL, FakeVllm
from tests.proxy.conftest import eventually, settings_with

LOCAL_SALT = owner_salt(Owner("local", "tenant"))
FORM = "Report of {place}. " + " ".join(f"Paragraph {number} says the same to all." for number in range(20))
OTHER: dict[str, object] = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": " ".join(f"{number * number:x} is odd" for number in range(60))}
    ],
}
QUICK: dict[str, object] = {
    "vllm__health_interval_s": 0.05,
    "vllm__journal_wait_s": 0.5,
    "vllm__connect_timeout_s": 10.0,
    "vllm__control_timeout_s": 10.0,
    "cost__min_saved_s": -3600.0,  # a vLLM that computes nothing is always faster
    "cost__min_saved_fraction": 0.0,
}


@dataclass
class Relay:
    """A running proxy in front of replicas."""

    url: str
    engine: VllmEngine
    app: web.Application
    http: aiohttp.ClientSession

    @property
    def lifecycle(self) -> Lifecycle:
        return self.app[SERVER].lifecycle

    @property
    def num_nodes(self) -> int:
        return len(self.engine.sharing.tree.nodes())

    @property
    def counts(self) -> Counts:
        return self.engine.status().counts

    @property
    def num_pending_tickets(self) -> int | None:
        return self.engine.status().num_pending_tickets

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def send(
        self, path: str, body: object = None, *, method: str = "POST", **headers: str
    ) -> aiohttp.ClientResponse:
        """Send `body` as JSON, bytes as they are; the answer is read."""
        given = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = None if body is None else io.BytesIO(raw)
        response = await self.http.request(method, self.url + path, data=data, headers=given)
        await response.read()
        return response

    async def chat(self, place: str, *, key: str = "none", **extra: object) -> aiohttp.ClientResponse:
        """A chat about the form everybody fills in; its news have come when this returns."""
        return await self.ask(chat_body(place, **extra), key=key)

    async def ask(self, body: object, *, key: str = "none") -> aiohttp.ClientResponse:
        """A chat whose news have come when this returns."""
        in_flight = self.engine.server.in_flight
        before = len(in_flight._by_ticket_id)
        response = await self.send("/v1/chat/completions", body, Authorization=f"Bearer {key}")
        await eventually(lambda: len(in_flight._by_ticket_id) <= before)
        return response


def chat_body(place: str, **extra: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": FORM.format(place=place)}], **extra}


@asynccontextmanager
async def running_relay(
    store: Path, *replicas: FakeVllm | dict[str, str], wait: bool = True, **overrides: object
) -> AsyncIterator[Relay]:
    """The proxy, on a free port; unless `wait` is off every replica is heard first."""
    configured = [entry.settings if isinstance(entry, FakeVllm) else entry for entry in replicas]
    settings = settings_with(
        engine__kind="vllm",
        vllm__replicas=configured,
        store__path=str(store),
        index__dense=False,
        **({"index__backend": "memory"} | QUICK | overrides),
    )
    engine = VllmEngine(settings)
    app = build_app(settings, engine)
    runner = FrontRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as http:
            relay = Relay(url, engine, app, http)
            await relay.lifecycle.wait_started()
            if wait:
                await eventually(lambda: len(relay.engine.fleet.sharing()) == len(replicas))
            yield relay
    finally:
        await runner.cleanup()
