"""
A `vllm serve` with the connector, as the proxy sees it: real sockets, vLLM's routes, the control protocol.

It has a byte tokenizer and an honest memory: what it keeps are the tokens of a stretch, and a ticket's copies
are written only where segment, namespace and tokens fit. It computes KV that it lacks, as the connector does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from delta_tree import SegmentId, Span, gaps, new_segment_id
from kvshare.vllm_protocol.messages import (
    PROTOCOL,
    Dropped,
    FinishedReport,
    Journal,
    JournalEvent,
    Prefilled,
    ReplicaInfo,
    StoredSegment,
    Ticket,
    digest_of,
)
from tests.fake_streams import EVENTS

BYTES_PER_TOKEN = 64
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
class Behaviour:
    """What it does beside answering."""

    names: tuple[str, ...] = (MODEL,)
    adapters: tuple[str, ...] = ()
    answer: str = "the answer"
    token_s: float = 0.0
    status: int = 200  # of the generating routes, and of those below them
    error: bytes = b'{"object": "error", "message": "no"}'  # what it answers with another status
    interjects: bytes = b""  # into a stream, after its first token
    die_after_chunks: int | None = None
    protocol: int = PROTOCOL
    refusals: tuple[str, ...] = ()
    token: str | None = None  # of the control server
    rank: int | None = None  # that the connector says it is
    renders: bool = True  # started with --enable-scale-out
    features: object = None  # of what it renders
    stores: bool = True
    prefills: bool = True  # tells of a prompt before it tells of its end
    silent: bool = False  # never tells the end of a ticket
    headers: Mapping[str, str] = field(default_factory=dict)


class FakeVllm:
    """One replica. `start` and `stop` may come several times; the ports stay."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.seen: list[Seen] = []
        self.rendered: list[Seen] = []
        self.num_tokenized = 0  # by /tokenize
        self.closed_early = asyncio.Event()  # a client went away in the middle of an answer
        self.sent = b""  # of the last generated answer
        self.dropped: list[SegmentId] = []
        self.running = asyncio.Event()
        self.prefill = asyncio.Event()  # prefills wait for it, if it is cleared
        self.prefill.set()
        self.release = asyncio.Event()  # and answers for this
        self.release.set()
        self.hurry = asyncio.Event()  # ends the pauses of answers to bodies with "slow"
        self._ports = [0, 0]
        self._runners: list[web.AppRunner] = []
        self.forget_all()

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

    def forget_all(self) -> None:
        """As a process that starts: nothing held, a new epoch."""
        self.epoch = secrets.token_hex(4)
        self.segments: dict[SegmentId, tuple[str, tuple[int, ...]]] = {}
        self.events: list[JournalEvent] = []
        self.prefilled: dict[str, Prefilled] = {}  # by ticket
        self.num_forgotten = 0  # events that are not remembered any more
        self._news = asyncio.Event()

    async def start(self) -> None:
        for number, app in enumerate((self._api(), self._control())):
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._ports[number], reuse_address=True).start()
            self._ports[number] = runner.addresses[0][1]
            self._runners.append(runner)

    async def stop(self) -> None:
        while self._runners:
            await self._runners.pop().cleanup()

    async def restart(self) -> None:
        await self.stop()
        self.forget_all()
        await self.start()

    def evict(self, *segment_ids: SegmentId) -> None:
        for segment_id in segment_ids:
            del self.segments[segment_id]
        self._tell(Dropped(tuple(segment_ids)))

    def forget_events(self) -> None:
        self.num_forgotten = len(self.events)

    def _tell(self, event: JournalEvent) -> None:
        self.events.append(event)
        self._news.set()
        self._news = asyncio.Event()

    # vLLM's own routes

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
        self.num_tokenized += 1
        return web.json_response({"tokens": self.tokens_of(body), "max_model_len": 4096})

    async def _render(self, request: web.Request) -> web.Response:
        self.rendered.append(Seen(request.method, request.path_qs, request.headers, await request.read()))
        if not self.behaviour.renders:
            return web.json_response({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)
        tokens = self.tokens_of(self.rendered[-1].body)
        document = {"request_id": "x", "token_ids": tokens, "features": self.behaviour.features}
        return web.json_response([document] if request.path == "/v1/completions/render" else document)

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
        self._prefill(seen)
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

    # the connector

    def _prefill(self, seen: Seen) -> None:
        """The prompt is there: it is kept before its answer is."""
        ticket, behaviour = seen.ticket, self.behaviour
        reports = behaviour.prefills and behaviour.stores and not behaviour.silent
        if ticket is None or not ticket.store or not reports:
            return
        tokens = self.tokens_of(seen.body)
        if ticket.prompt_digest == digest_of(tokens):
            used = self._written(ticket, tokens)
            computed = gaps((ticket.copies[index].target for index in used), len(tokens))
            stored = tuple(self._store(ticket, tokens, span) for span in computed)
            self.prefilled[ticket.ticket_id] = Prefilled(ticket.ticket_id, tuple(used), stored)
            self._tell(self.prefilled[ticket.ticket_id])

    def _written(self, ticket: Ticket, tokens: list[int]) -> list[int]:
        return [index for index in range(len(ticket.copies)) if self._can_write(ticket, index, tokens)]

    def _end(self, seen: Seen, answer: str) -> None:
        ticket = seen.ticket
        if ticket is None or self.behaviour.silent:
            return
        tokens = self.tokens_of(seen.body)
        fits = ticket.prompt_digest == digest_of(tokens)
        prompt = self.prefilled.pop(ticket.ticket_id, None)
        used = list(prompt.used) if prompt is not None else self._written(ticket, tokens) if fits else []
        num_copied = sum(ticket.copies[index].length for index in used)
        is_exact = all(ticket.copies[index].target.end <= ticket.exact_length for index in used)
        finished = FinishedReport(
            ticket.ticket_id,
            decision="full" if not used else "exact" if is_exact else "approx",
            reason=None if fits else "prompt_mismatch",
            num_computed=len(tokens) - num_copied,
            stage_seconds={"write": 0.001, "pass": 0.01, "save": 0.001},
        )
        if fits and ticket.store and self.behaviour.stores:
            output = list(answer.encode())
            whole = len(tokens) + len(output)
            known = [Span(0, len(tokens))] if prompt else [ticket.copies[index].target for index in used]
            added = [self._store(ticket, tokens + output, span) for span in gaps(known, whole)]
            stored = (*(prompt.stored if prompt else ()), *added)
            finished = replace(finished, used=tuple(used), output_ids=tuple(output), stored=stored)
        self._tell(finished)

    def _can_write(self, ticket: Ticket, index: int, tokens: list[int]) -> bool:
        copy = ticket.copies[index]
        namespace, stored = self.segments.get(copy.segment_id, ("", ()))
        wanted = tuple(tokens[copy.target.start : copy.target.end])
        return namespace == ticket.namespace and stored[copy.offset : copy.offset + copy.length] == wanted

    def _store(self, ticket: Ticket, tokens: list[int], span: Span) -> StoredSegment:
        segment_id = new_segment_id()
        self.segments[segment_id] = (ticket.namespace, tuple(tokens[span.start : span.end]))
        return StoredSegment(segment_id, span.start, len(span), len(span) * BYTES_PER_TOKEN)

    def _control(self) -> web.Application:
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/info", self._info)
        app.router.add_get("/journal", self._journal)
        app.router.add_get("/segments", self._segments)
        app.router.add_post("/drop", self._drop)
        return app

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = self.behaviour.token
        if token is not None and request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"error": "who are you"}, status=401)
        return await handler(request)

    async def _info(self, request: web.Request) -> web.Response:
        info = ReplicaInfo(
            epoch=self.epoch,
            model=MODEL,
            versions={"vllm": "0.32.0"},
            refusals=self.behaviour.refusals,
            warnings=(),
            can_move_keys=True,
            namespace_fields={
                "model": MODEL,
                "revision": "r",
                "tokenizer": "bytes",
                "dtype": "float32",
                "kv_layout": "1x1x8",
                "rope": "none",
            },
            bytes_per_token=BYTES_PER_TOKEN,
            max_bytes=10**7,
            num_bytes=sum(len(tokens) * BYTES_PER_TOKEN for _, tokens in self.segments.values()),
            num_segments=len(self.segments),
            max_model_len=4096,
            data_parallel_rank=self.behaviour.rank,
            data_parallel_size=1 if self.behaviour.rank is None else 2,
        )
        return web.json_response({**info.to_json(), "protocol": self.behaviour.protocol})

    async def _journal(self, request: web.Request) -> web.Response:
        after, wait_s = int(request.query["after"]), float(request.query["wait_s"])
        if after >= len(self.events):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
        events = tuple(self.events[max(after, self.num_forgotten) :])
        gap = after < self.num_forgotten or after > len(self.events)
        return web.json_response(Journal(self.epoch, len(self.events), gap, events).to_json())

    async def _segments(self, request: web.Request) -> web.Response:
        document = {"epoch": self.epoch, "last": len(self.events), "segment_ids": list(self.segments)}
        return web.json_response(document)

    async def _drop(self, request: web.Request) -> web.Response:
        known = [entry for entry in (await request.json())["segment_ids"] if entry in self.segments]
        self.dropped += known
        if known:
            self.evict(*known)
        return web.json_response({"num_dropped": len(known)})


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
