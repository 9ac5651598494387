"""
A `vllm serve` with the connector, as the proxy sees it: real sockets and vLLM's routes.

It has a byte tokenizer and an honest memory: what it keeps are the tokens of a stretch, and a ticket's copies
are written only where segment, namespace and tokens fit. It computes KV that it lacks, as the connector does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from delta_tree import Span, token_ids
from kvshare.fleet.rendered_media import read_media
from kvshare.vllm_protocol.media import identified
from kvshare.vllm_protocol.messages import (
    Ticket,
)
from tests.fake_connector import ConnectorBehaviour, FakeConnector
from tests.fake_streams import EVENTS

MODEL = "tiny"
SLOW_TOKEN_S = 10.0


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.raw)
        return document

    @property
    def ticket(self) -> Ticket | None:
        document = (self.body.get("kv_transfer_params") or {}).get("kvshare")
        return None if document is None else Ticket.from_json(document)


@dataclass
class Behaviour(ConnectorBehaviour):
    """What it does in addition to answering."""

    names: tuple[str, ...] = (MODEL,)
    adapters: tuple[str, ...] = ()
    answer: str = "the answer"
    token_s: float = 0.0
    status: int = 200  # of the generating routes, and of those below them
    error: bytes = b'{"object": "error", "message": "no"}'  # what it answers with another status
    interjects: bytes = b""  # into a stream, after its first token
    die_after_chunks: int | None = None
    renders: bool = True  # started with --enable-scale-out
    features: object = None  # of what it renders
    headers: Mapping[str, str] = field(default_factory=dict)


class FakeVllm(FakeConnector):
    """One replica. `start` and `stop` may come several times; the ports stay."""

    model = MODEL
    behaviour: Behaviour

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        super().__init__(behaviour or Behaviour())
        self.seen: list[Seen] = []
        self.rendered: list[Seen] = []
        self.tokenized: list[Mapping[str, Any]] = []  # bodies to /tokenize
        self.closed_early = asyncio.Event()  # a client went away in the middle of an answer
        self.sent = b""  # of the last generated answer
        self.running = asyncio.Event()
        self.prefill = asyncio.Event()  # prefills wait for it, if it is cleared
        self.prefill.set()
        self.release = asyncio.Event()  # and answers for this
        self.release.set()
        self.hurry = asyncio.Event()  # ends the pauses of answers to bodies with "slow"
        self._ports = [0, 0]
        self._runners: list[web.AppRunner] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self._ports[1]}"

    @property
    def settings(self) -> dict[str, str]:
        return {"url": self.url, "control_url": self.control_url}

    @property
    def generated(self) -> list[Seen]:
        """The requests that asked for an answer."""
        return [seen for seen in self.seen if seen.path in EVENTS]

    @property
    def tickets(self) -> list[Ticket]:
        return [seen.ticket for seen in self.generated if seen.ticket is not None]

    async def start(self) -> None:
        for number, app in enumerate((self._api(), self.control_app())):
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._ports[number], reuse_address=True).start()
            self._ports[number] = runner.addresses[0][1]
            self._runners.append(runner)

    async def stop(self) -> None:
        while self._runners:
            await self._runners.pop().cleanup()

    async def stop_api(self) -> None:
        """The connector goes on."""
        await self._runners.pop(0).cleanup()

    async def restart(self) -> None:
        await self.stop()
        self.forget_all()
        await self.start()

    def _api(self) -> web.Application:
        app = web.Application(client_max_size=2**27)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        for path in EVENTS:
            app.router.add_post(path, self._generate)
            app.router.add_post(f"{path}/render", self._render)
        app.router.add_route("*", "/{path:.*}", self._other)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        base = [{"id": name, "parent": None, "max_model_len": 4096} for name in self.behaviour.names]
        adapters = [{"id": name, "parent": MODEL} for name in self.behaviour.adapters]
        return web.json_response({"object": "list", "data": base + adapters})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized.append(body)
        return web.json_response({"tokens": self.tokens_of(body), "max_model_len": 4096})

    async def _render(self, request: web.Request) -> web.Response:
        self.rendered.append(Seen(request.method, request.path_qs, request.headers, await request.read()))
        if not self.behaviour.renders:
            return web.json_response({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)
        tokens = self.tokens_of(self.rendered[-1].body)
        document = {"request_id": "x", "token_ids": tokens, "features": self.behaviour.features}
        return web.json_response([document] if request.path == "/v1/completions/render" else document)

    def computed_tokens(self, body: Mapping[str, Any]) -> list[int]:
        """What it computes for a body: the tokens that it is given back, or else what it renders itself."""
        given: list[int] | None = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        tokens = self.tokens_of(body) if given is None else given
        media = read_media(self.behaviour.features)
        return identified(token_ids(tokens), media).tolist() if media else tokens

    def tokens_of(self, body: Mapping[str, Any]) -> list[int]:
        """Bytes of a trivial template, or of a plain prompt; tools stand before all."""
        if "prompt" in body:
            prompt = body["prompt"]
            return list(prompt.encode()) if isinstance(prompt, str) else prompt
        given = body["messages"] if "messages" in body else body["input"]
        turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
        texts = [f"<{turn.get('role')}>{_text(turn)}" for turn in turns]
        for name in ("system", "instructions", "tools"):
            texts[:0] = [f"<{name}>{body[name]}"] if body.get(name) else []
        return list(f"{''.join(texts)}<assistant>".encode())

    async def _other(self, request: web.Request) -> web.Response:
        await self._note(request)
        if self.behaviour.status != 200 and request.path.startswith(tuple(EVENTS)):
            return self._refusal()
        return web.json_response({"path": request.path}, status=203, headers={"X-Vllm": "yes"})

    async def _note(self, request: web.Request) -> Seen:
        raw = await request.read()
        self.seen.append(Seen(request.method, request.path_qs, request.headers, raw))
        return self.seen[-1]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = await self._note(request)
        if self.behaviour.status != 200:
            return self._refusal()
        if seen.body.get("stream"):
            return await self._stream(request, seen)
        await self._compute(seen)
        document = {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "choices": []}
        self._end(seen, self.behaviour.answer)
        self.sent = json.dumps(document, indent=1).encode()
        return web.Response(body=self.sent, content_type="application/json")

    def _refusal(self) -> web.Response:
        behaviour = self.behaviour
        return web.Response(
            status=behaviour.status,
            body=behaviour.error,
            content_type="application/json",
            headers=behaviour.headers,
        )

    async def _compute(self, seen: Seen) -> None:
        self.running.set()
        await self.prefill.wait()
        if seen.ticket is not None:
            self.note_prefilled(seen.ticket, self.computed_tokens(seen.body))
        await self.release.wait()

    async def _stream(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", **self.behaviour.headers}
        )
        events = EVENTS[request.path]
        self.sent = b""
        if not events.opening:
            await self._compute(seen)
        await response.prepare(request)
        if events.opening:
            await self._write(response, events.opening)
            await self._compute(seen)
        told = ""
        try:
            await self._write(response, events.beginning)
            for number, character in enumerate(self.behaviour.answer):
                if number == self.behaviour.die_after_chunks:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await self._pause(seen, number)
                await self._write(response, events.text(character))
                if not number and self.behaviour.interjects:
                    await self._write(response, self.behaviour.interjects)
                told += character
            await self._write(response, events.closing)
        except (ConnectionError, asyncio.CancelledError):
            self.closed_early.set()
            raise
        finally:
            self._end(seen, told)
        return response

    def _end(self, seen: Seen, answer: str) -> None:
        if seen.ticket is not None:
            self.note_ended(seen.ticket, self.computed_tokens(seen.body), answer)

    async def _pause(self, seen: Seen, number: int) -> None:
        """Before a token; those of a slow answer are ten seconds apart, but for the first."""
        if not seen.body.get("slow"):
            await asyncio.sleep(self.behaviour.token_s)
        elif number:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.hurry.wait(), SLOW_TOKEN_S)

    async def _write(self, response: web.StreamResponse, raw: bytes) -> None:
        self.sent += raw
        await response.write(raw)


@asynccontextmanager
async def running_vllm(behaviour: Behaviour | None = None) -> AsyncIterator[FakeVllm]:
    """A replica on free ports."""
    replica = FakeVllm(behaviour)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or message.get("output") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def covered(ticket: Ticket) -> list[Span]:
    """The stretches that a ticket copies."""
    return [copy.target for copy in ticket.copies]
