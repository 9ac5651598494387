"""Starting, draining and stopping, with the signals that an operator sends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kvshare.errors import EngineError, ModelError
from kvshare_lab.vllm.ports import free_ports
from proxy.app import serve
from tests.proxy.conftest import chat, eventually, running_server, settings_with
from tests.proxy.fake_engine import Behaviour, FakeEngine

CHAT = "/v1/chat/completions"


class Serving:
    """A `serve` that runs in this loop, and a client for it."""

    def __init__(
        self, url: str, engine: FakeEngine, task: asyncio.Task[None], http: aiohttp.ClientSession
    ) -> None:
        self.url, self.engine, self.task, self.http = url, engine, task, http

    async def status(self, path: str) -> int:
        async with self.http.get(self.url + path) as response:
            return response.status

    async def ask(self, text: str = "hello", *, stream: bool = False) -> tuple[int, str]:
        async with self.http.post(self.url + CHAT, json=chat(text, stream=stream)) as response:
            return response.status, await response.text()


@asynccontextmanager
async def serving(behaviour: Behaviour | None = None, **overrides: object) -> AsyncIterator[Serving]:
    """`serve` until the block ends or a signal stops it."""
    engine = FakeEngine(behaviour)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(settings_with(**overrides), engine, on_listening=listening.set_result))
    either: list[asyncio.Future[Any]] = [listening, task]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    async with aiohttp.ClientSession() as http:
        try:
            yield Serving(await listening, engine, task, http)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_it_listens_while_the_engine_starts() -> None:
    """/health answers at once; /ready and requests are 503 until the engine is up, then 200."""
    async with running_server(Behaviour(start_s=0.2), wait=False) as server:
        assert (await server.get("/health")).status == 200
        response = await server.get("/ready")
        assert (response.status, (await response.json())["status"]) == (503, "starting")
        assert (await server.get("/metrics")).status == 200
        for response in (await server.post(CHAT, chat()), await server.get("/v1/models")):
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "not_ready"
        await server.lifecycle.wait_started()
        response = await server.get("/ready")
        assert (response.status, await response.json()) == (200, {"status": "ready", "detail": "echoing"})
        assert (await server.post(CHAT, chat())).status == 200
    assert server.engine.is_stopped


async def test_a_dead_engine_is_not_ready() -> None:
    """/ready follows the engine's own word after the start."""
    async with running_server() as server:
        server.engine.is_started = False
        assert (await server.get("/ready")).status == 503
        assert (await server.get("/health")).status == 200


async def test_serve_takes_a_free_port_and_both_listeners() -> None:
    """Port 0 is reported as the port that was taken; the admin port listens beside it."""
    (admin_port,) = free_ports(1)
    async with serving(server__admin_port=admin_port) as front:
        assert not front.url.endswith(":0")
        assert (await front.ask())[0] == 200
        async with front.http.get(f"http://127.0.0.1:{admin_port}/metrics") as response:
            assert response.status == 200


async def test_serve_raises_what_the_start_raises() -> None:
    """An engine that cannot load ends the server with its own error."""
    engine = FakeEngine(Behaviour(start_error=ModelError("no such model")))
    with pytest.raises(ModelError, match="no such model"):
        await serve(settings_with(), engine, on_listening=lambda url: None)
    assert engine.is_stopped


async def test_serve_raises_for_a_taken_port() -> None:
    """Before the engine starts, with the setting's name."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = FakeEngine()
        settings = settings_with(server__port=taken.getsockname()[1])
        with pytest.raises(EngineError, match=r"server\.port .*address already in use"):
            await serve(settings, engine, on_listening=lambda url: None)
    assert not engine.is_started


@pytest.mark.parametrize("stream", [False, True])
async def test_serve_notices_clients_that_go_away(stream: bool) -> None:
    """aiohttp's cancellation of handlers, off by default, is on in the server that runs."""
    async with serving(Behaviour(token_s=0.5)) as front:
        asking = asyncio.create_task(front.ask("x" * 100, stream=stream))
        await asyncio.wait_for(front.engine.running.wait(), 20)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(front.engine.freed.wait(), 20)


async def test_sigterm_while_starting_ends_at_once() -> None:
    """A server that still loads its model does not make the operator wait."""
    async with serving(Behaviour(start_s=30)) as front:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(front.task, 20)


async def test_sigterm_drains() -> None:
    """Running answers finish, new ones are 503, /ready says draining, and the server ends by itself."""
    async with serving(Behaviour(token_s=0.08)) as front:
        running = asyncio.create_task(front.ask("0123456789", stream=True))
        await asyncio.wait_for(front.engine.running.wait(), 20)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.02)
        assert await front.status("/ready") == 503
        assert await front.status("/health") == 200
        status, text = await front.ask()
        assert status == 503
        assert '"shutting_down"' in text
        status, text = await running
        assert status == 200
        assert '"finish_reason":"stop"' in text
        await asyncio.wait_for(front.task, 20)
    assert front.engine.is_stopped


@pytest.mark.parametrize("second_signal", [False, True])
async def test_what_does_not_finish_in_time_ends_with_an_error(second_signal: bool) -> None:
    """After drain_s, or at a second signal, a stream gets an error frame and [DONE], a plain request 503."""
    drain_s = 30.0 if second_signal else 0.05
    async with serving(Behaviour(token_s=0.2), server__drain_s=drain_s) as front:
        stream = asyncio.create_task(front.ask("x" * 100, stream=True))
        plain = asyncio.create_task(front.ask("x" * 100))
        await eventually(lambda: front.engine.num_running == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        if second_signal:
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        status, text = await asyncio.wait_for(stream, 20)
        assert status == 200
        assert '"shutting_down"' in text
        assert text.endswith("data: [DONE]\n\n")
        status, text = await asyncio.wait_for(plain, 20)
        assert status == 503
        await asyncio.wait_for(front.task, 20)
    assert front.engine.num_running == 0


async def test_what_still_waits_to_start_ends_with_an_error_too() -> None:
    """A drain ends a request that is being planned with 503, and frees its slot."""
    async with running_server(Behaviour(plan_s=60)) as server:
        asking = asyncio.create_task(server.post(CHAT, chat()))
        await server.engine.running.wait()
        await server.lifecycle.drain(0.01)
        assert (await asyncio.wait_for(asking, 20)).status == 503
        assert server.engine.num_running == server.lifecycle.num_running == 0


async def test_the_client_can_retry_through_a_start() -> None:
    """The openai client's own retries get through while the model loads."""
    async with (
        running_server(Behaviour(start_s=0.3), wait=False) as server,
        server.client().with_options(max_retries=3) as client,
    ):
        answer = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "hello"}]
        )
    assert answer.choices[0].message.content == "hello"
