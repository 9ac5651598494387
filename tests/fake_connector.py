"""The connector in a fake vLLM, as the proxy sees it: what it holds, its journal, the control protocol."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace

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
    StoredSegment,
    Ticket,
    digest_of,
)
from kvshare.vllm_protocol.places import DiskProblem, OnDiskOnly
from kvshare.vllm_protocol.replica_info import ReplicaInfo

BYTES_PER_TOKEN = 64


@dataclass
class ConnectorBehaviour:
    """What it reports, and what it keeps to itself."""

    protocol: int = PROTOCOL
    refusals: tuple[str, ...] = ()
    speculation: str = ""  # the method; then each answer takes two steps after its first token
    passing: str = ""
    caches_prefixes: bool = False  # of prompts without copies a part is in vLLM's own cache
    token: str | None = None  # of the control server
    rank: int | None = None  # that the connector says it is
    stores: bool = True
    prefills: bool = True  # tells of a prompt before it tells of its end
    silent: bool = False  # never tells the end of a ticket
    max_bytes: int = 10**7
    max_disk_bytes: int = 0  # 0: no disk
    disk_problem: DiskProblem = field(default_factory=DiskProblem)
    shared_store: str = ""  # that it shares with others
    can_share_media: bool = False
    device: str = "a device"


class FakeConnector:
    """Holds segments by name; a ticket's copies are checked against their tokens."""

    model: str

    def __init__(self, behaviour: ConnectorBehaviour) -> None:
        self.behaviour = behaviour
        self.dropped: list[SegmentId] = []
        self.left_in_store: list[SegmentId] = []  # of those that were dropped
        self.segments: dict[SegmentId, tuple[str, tuple[int, ...]]] = {}
        self.forget_all()

    def forget_all(self) -> None:
        """As a process that starts: nothing held, a new epoch. What the disk has is still there."""
        self.epoch = secrets.token_hex(4)
        if not self.behaviour.max_disk_bytes:
            self.segments = {}
        self.on_disk = set(self.segments)
        self.events: list[JournalEvent] = []
        self.prefilled: dict[str, Prefilled] = {}  # by ticket
        self.num_forgotten = 0  # events that are not remembered any more
        self._news = asyncio.Event()

    def evict(self, *segment_ids: SegmentId) -> None:
        for segment_id in segment_ids:
            del self.segments[segment_id]
        self._tell(Dropped(tuple(segment_ids)))

    def report_disk(self, reason: str, *, is_lasting: bool = False) -> None:
        """Empty: it is written again."""
        self.behaviour.disk_problem = DiskProblem(reason, is_lasting)
        self._tell(self.behaviour.disk_problem)

    def adopt(self, other: FakeConnector) -> None:
        """What another one has written to the store that they share."""
        found = {each: held for each, held in other.segments.items() if each not in self.segments}
        self.segments |= found
        self.on_disk |= found.keys()
        num_bytes = tuple(BYTES_PER_TOKEN * len(tokens) for _, tokens in found.values())
        self._tell(OnDiskOnly(came=tuple(found), num_bytes=num_bytes))

    def forget_events(self) -> None:
        self.num_forgotten = len(self.events)

    def _tell(self, event: JournalEvent) -> None:
        self.events.append(event)
        self._news.set()
        self._news = asyncio.Event()

    def note_prefilled(self, ticket: Ticket, tokens: list[int]) -> None:
        """The prompt is there: it is kept before its answer is."""
        behaviour = self.behaviour
        reports = behaviour.prefills and behaviour.stores and not behaviour.silent
        if not ticket.store or not reports:
            return
        if ticket.prompt_digest == digest_of(tokens):
            used = self._written(ticket, tokens)
            computed = gaps((ticket.copies[index].target for index in used), len(tokens))
            stored = tuple(self._store(ticket, tokens, span) for span in computed)
            self.prefilled[ticket.ticket_id] = Prefilled(ticket.ticket_id, tuple(used), stored)
            self._tell(self.prefilled[ticket.ticket_id])

    def _written(self, ticket: Ticket, tokens: list[int]) -> list[int]:
        return [index for index in range(len(ticket.copies)) if self._can_write(ticket, index, tokens)]

    def note_ended(self, ticket: Ticket, tokens: list[int], answer: str) -> None:
        if self.behaviour.silent:
            return
        fits = ticket.prompt_digest == digest_of(tokens)
        prompt = self.prefilled.pop(ticket.ticket_id, None)
        used = list(prompt.used) if prompt is not None else self._written(ticket, tokens) if fits else []
        num_copied = sum(ticket.copies[index].length for index in used)
        has_prefix = self.behaviour.caches_prefixes and not ticket.copies
        is_exact = all(ticket.copies[index].target.end <= ticket.exact_length for index in used)
        finished = FinishedReport(
            ticket.ticket_id,
            decision="full" if not (used or has_prefix) else "exact" if is_exact else "approx",
            reason=None if fits else "prompt_mismatch",
            num_computed=len(tokens) - num_copied - has_prefix,
            num_local=int(has_prefix),
            num_answer_steps=2 if self.behaviour.speculation else 0,
            num_answer_tokens=5 if self.behaviour.speculation else 0,
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

    def control_app(self) -> web.Application:
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
        shares = not (self.behaviour.refusals or self.behaviour.passing)
        info = ReplicaInfo(
            epoch=self.epoch,
            model=self.model,
            versions={"vllm": "0.32.0"},
            refusals=self.behaviour.refusals,
            warnings=(),
            can_move_keys=shares,
            can_choose=shares,
            namespace_fields={  # without a worker that shares, these are not known
                "model": self.model,
                "revision": "r" if shares else "",
                "tokenizer": "bytes",
                "dtype": "float32" if shares else "unknown",
                "kv_layout": "1x1x8" if shares else "0x0x0",
                "rope": "none" if shares else "unknown",
            },
            bytes_per_token=BYTES_PER_TOKEN if shares else 0,
            max_bytes=self.behaviour.max_bytes,
            num_bytes=sum(len(tokens) * BYTES_PER_TOKEN for _, tokens in self.segments.values()),
            num_segments=len(self.segments),
            max_model_len=4096,
            device=self.behaviour.device,
            max_disk_bytes=self.behaviour.max_disk_bytes,
            disk_problem=self.behaviour.disk_problem,
            shared_store=self.behaviour.shared_store,
            speculation=self.behaviour.speculation,
            passing=self.behaviour.passing,
            can_share_media=self.behaviour.can_share_media,
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
        return web.json_response({**document, "on_disk": sorted(self.on_disk & self.segments.keys())})

    async def _drop(self, request: web.Request) -> web.Response:
        asked = await request.json()
        known = [entry for entry in asked["segment_ids"] if entry in self.segments]
        self.dropped += known
        self.left_in_store += known if asked.get("stays_shared") else []
        if known:
            self.evict(*known)
        return web.json_response({"num_dropped": len(known)})
