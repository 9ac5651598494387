"""A real server on a free loopback port around a FakeEngine, and the clients that talk to it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from kvshare.settings import Settings, SettingsSource, load_settings
from proxy.app import build_admin_app, build_app
from proxy.connection import FrontRunner
from proxy.context import SERVER
from proxy.lifecycle import Lifecycle
from tests.proxy.fake_engine import Behaviour, FakeEngine

KEYS = [
    {"name": "alice", "tenant": "acme", "scope": "tenant", "role": "infer"},
    {"name": "bob", "tenant": "acme", "scope": "tenant", "role": "infer"},
    {"name": "carol", "tenant": "acme", "scope": "private", "role": "infer"},
    {"name": "dave", "tenant": "acme", "scope": "private", "role": "infer"},
    {"name": "eve", "tenant": "globex", "scope": "tenant", "role": "infer"},
    {"name": "root", "tenant": "acme", "scope": "tenant", "role": "admin"},
]


def key_of(name: str) -> str:
    """The API key of a caller in KEYS."""
    return f"sk-{name}"


def key_settings() -> list[dict[str, str]]:
    return [entry | {"sha256": hashlib.sha256(key_of(entry["name"]).encode()).hexdigest()} for entry in KEYS]


@dataclass
class Server:
    """A running front, its engine and a raw HTTP client."""

    url: str
    engine: FakeEngine
    app: web.Application
    http: aiohttp.ClientSession

    @property
    def lifecycle(self) -> Lifecycle:
        return self.app[SERVER].lifecycle

    def client(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def anthropic(self, key: str = "none") -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=key, max_retries=0)

    async def post(self, path: str, body: object, **headers: str) -> aiohttp.ClientResponse:
        """POST `body` as JSON and read the answer; bytes go out as they are."""
        given = {"Content-Type": "application/json"} | headers
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(self.url + path, data=io.BytesIO(raw), headers=given)
        await response.read()
        return response

    async def get(self, path: str, **headers: str) -> aiohttp.ClientResponse:
        response = await self.http.get(self.url + path, headers=headers)
        await response.read()
        return response


def chat(text: str = "hello", /, **extra: object) -> dict[str, object]:
    """A chat completion body."""
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **extra}


def settings_with(**overrides: object) -> Settings:
    """The defaults with no controller and no search that is late. `server__port=0` means server.port."""
    changes = {name.replace("__", "."): value for name, value in overrides.items()}
    defaults = {"server.port": 0, "control.unshared_share": 0.0, "cost.measure_at_start": False}
    defaults["sharing.max_risk"] = 1.0  # what is certified of a model is no question here
    defaults |= {"index.search_timeout_s": 60.0, "index.embed_timeout_s": 60.0}  # nor how busy a machine is
    return load_settings(overrides={**defaults, **changes})


@asynccontextmanager
async def running_server(
    behaviour: Behaviour | None = None,
    *,
    wait: bool = True,
    admin: bool = False,
    source: SettingsSource | None = None,
    **overrides: object,
) -> AsyncIterator[Server]:
    """
    The server, with the engine started unless `wait` is off; `admin`: its admin port.

    `source`: where all its settings come from; None: from `overrides`, and nothing can be read again.
    """
    engine = FakeEngine(behaviour)
    settings = settings_with(**{"store__path": None, **overrides}) if source is None else source.load()
    app = build_app(settings, engine, source)
    async with AsyncExitStack() as stack:
        runner = await _listening(stack, app)
        if admin:
            runner = await _listening(stack, build_admin_app(app))
        port = runner.addresses[0][1]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        server = Server(f"http://127.0.0.1:{port}", engine, app, http)
        if wait:
            await server.lifecycle.wait_started()
        yield server


async def _listening(stack: AsyncExitStack, app: web.Application) -> FrontRunner:
    runner = FrontRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server with the defaults: no keys, a willing engine."""
    async with running_server() as running:
        yield running


@pytest.fixture
async def guarded() -> AsyncIterator[Server]:
    """A server with the keys of KEYS."""
    async with running_server(auth__keys=key_settings()) as running:
        yield running


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
    """Wait until `condition` holds; fails after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)
