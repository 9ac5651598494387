"""
Chooses the replica of each request and plans it.

A request goes to its donors' KV, unless that replica is overloaded; else to the idlest.

Namespaces are a replica's, as KV cannot move: a prompt is looked up in each, and goes where it is cheapest.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from delta_tree import TokenIds
from kvshare.errors import NoReplicaError, UpstreamError
from kvshare.fleet.client import NO_ROUTE, RenderedPrompt
from kvshare.fleet.in_flight import InFlight, RoutedRequest
from kvshare.fleet.replica import Fleet, Replica
from kvshare.reasons import Reason
from kvshare.requests import SharingMode
from kvshare.safe_logging import classes_and_places
from kvshare.settings import VllmSettings
from kvshare.sharing.explain import explain_lookup
from kvshare.sharing.pipeline import Lookup, Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.telemetry import Component, FallbackReason
from kvshare.vllm_protocol.messages import Ticket, WireCopy, WireOrder, WireSpan, digest_of

log = logging.getLogger(__name__)

_RECONCILE_S = 0.25  # a prompt is stored after its answer; its owner's next request waits for that, so long


class Router:
    """On the way of every request, before it is sent and while it is answered."""

    def __init__(self, sharing: Sharing, fleet: Fleet, in_flight: InFlight, settings: VllmSettings) -> None:
        self._sharing = sharing
        self._fleet = fleet
        self._in_flight = in_flight
        self._settings = settings

    async def render(self, path: str, body: bytes) -> list[RenderedPrompt] | None:
        """
        The prompts of a body for a generating route, by vLLM itself; None where no replica has `/render`.

        Raises:  NoReplicaError, UpstreamError
        """
        self._next_replica()
        while replica := next((entry for entry in self._fleet.serving() if entry.renders), None):
            try:
                return await replica.vllm.render(path, body)
            except UpstreamError as exc:
                if exc.status not in NO_ROUTE:
                    raise
                if replica.renders:
                    log.warning(
                        "replica %s has no /render routes: /v1/responses and /v1/messages are not shared, "
                        "and chats are tokenized by /tokenize; start vLLM with --enable-scale-out",
                        replica.name,
                    )
                replica.renders = False
        return None

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """By vLLM's own template and tokenizer. Raises NoReplicaError, UpstreamError."""
        return await self._next_replica().vllm.tokenize(body)

    async def route(self, request: RoutedRequest) -> Replica:
        """
        Plan a request and choose its replica. Whatever fails in planning, it goes unshared.

        Raises:  NoReplicaError
        """
        prompt = request.prompt
        reason = Reason.OFF if request.mode is SharingMode.OFF else Reason.SHORT_PROMPT
        if prompt is not None and request.mode is not SharingMode.OFF:
            # One too short to look up goes the same way: its answer may make it long enough to be stored.
            if self._sharing.wants(prompt, request.mode):
                await self._in_flight.wait_reconciled(request.owner, timeout_s=_RECONCILE_S)
                reason = Reason.NO_CONNECTOR  # unless there is a lookup
            try:
                replica, lookup = await self._found_or_waited_for(request)
                if replica is not None and replica.serves and lookup is not None:
                    self._sharing.note_use(lookup)
                    self._plan(request, replica, lookup)
                    return replica
            except Exception as exc:  # noqa: BLE001  logged, without its message
                log.warning("planning failed, the request is served without it: %s", classes_and_places(exc))
                self._sharing.telemetry.fallback(Component.PLANNING, FallbackReason.ERROR)
                reason = Reason.LOOKUP_FAILED
        request.plan, request.ticket = NoPlan(reason), None
        return self._next_replica()

    def reroute(self, request: RoutedRequest, tried: Sequence[Replica]) -> Replica:
        """
        Another replica, as the last of `tried` did not take the request. The plan's KV is not there.

        The last one gets no more requests until vLLM answers again. Raises NoReplicaError.
        """
        tried[-1].models = None
        self._sharing.telemetry.replica_failed(tried[-1].name)
        request.plan, request.ticket = NoPlan(Reason.REPLICA_GONE), None
        return self._next_replica(without=tried)

    @contextmanager
    def sending(self, request: RoutedRequest, replica: Replica) -> Iterator[None]:
        """Counts the request at its replica while inside; one with a ticket is awaited in the journal."""
        self._fleet.advance_rotation()
        request.execution.replica, request.was_refused = replica.name, False
        request.was_alone, request.sent_at = replica.num_inflight == 0, time.perf_counter()
        replica.num_inflight += 1
        self._in_flight.add(request)
        try:
            yield
        finally:
            replica.num_inflight -= 1
            self._in_flight.end(request)

    def note_unshared(self, reason: Reason) -> None:
        """Count a request that cannot be planned, and why."""
        self._sharing.telemetry.unshared(reason)

    async def explain(self, request: RoutedRequest) -> dict[str, Any]:
        """The plan this request would get, and where; a JSON-ready document. Nothing is sent."""
        assert request.prompt is not None, "only what is tokenized can be explained"
        replica, found = await self._find(request)
        lookup = found or Lookup(NoPlan(Reason.NO_CONNECTOR))
        document = await asyncio.to_thread(
            explain_lookup, self._sharing, request.prompt, lookup, request.mode
        )
        return {**document, "replica": None if replica is None else replica.name}

    async def _found_or_waited_for(self, request: RoutedRequest) -> tuple[Replica | None, Lookup | None]:
        """As `_find`, also for a prompt like this one that is being computed just now, at any replica."""
        if request.prompt is None or not self._wants(request):
            return await self._find(request)
        replica: Replica | None = None
        found: Lookup | None = None

        async def look_up() -> Lookup:
            nonlocal replica, found
            replica, found = await self._find(request)
            return found or Lookup(NoPlan(Reason.NO_CONNECTOR))

        namespaces = [entry.namespace(request.owner).digest for entry in self._fleet.sharing()]
        lookup = await self._in_flight.arrivals.waited(
            namespaces, request.prompt.token_ids, request.mode, look_up
        )
        return replica, None if found is None else lookup

    def _wants(self, request: RoutedRequest) -> bool:
        return request.prompt is not None and self._sharing.wants(request.prompt, request.mode)

    async def _find(self, request: RoutedRequest) -> tuple[Replica | None, Lookup | None]:
        """The replica to go to and what was found there; neither if no replica shares."""
        sharing = self._fleet.sharing()
        if not sharing:
            return None, None
        alone = len(sharing) == 1
        found = await asyncio.gather(
            *(self._look_up(request, replica, by_meaning=alone) for replica in sharing)
        )
        lookups: dict[Replica, Lookup | None] = dict(zip(sharing, found, strict=True))
        lookups |= {replica: None for replica in self._fleet.serving() if not replica.shares}
        best = choose(lookups, self._settings)
        lookup = lookups[best]
        if not alone and lookup is not None and isinstance(lookup.plan, NoPlan):
            # Embedding is expensive: only where tokens found nothing, and once.
            lookup = await self._look_up(request, best, by_meaning=True)
        return best, lookup

    async def _look_up(self, request: RoutedRequest, replica: Replica, *, by_meaning: bool) -> Lookup:
        assert request.prompt is not None, "checked by the callers"
        namespace = replica.namespace(request.owner).digest
        return await self._sharing.find_plan(namespace, request.prompt, request.mode, by_meaning=by_meaning)

    def _plan(self, request: RoutedRequest, replica: Replica, lookup: Lookup) -> None:
        """With a ticket: for the plan, or so that the prompt may be stored, or for both."""
        assert request.prompt is not None, "a lookup has a prompt"
        request.plan = lookup.plan
        if not isinstance(lookup.plan, Plan) and not request.may_store:
            return
        namespace, tokens = replica.namespace(request.owner).digest, request.prompt.token_ids
        request.ticket = ticket_for(
            lookup.plan,
            tokens,
            request_id=uuid.uuid4().hex,  # a secret: its salt is made of it
            namespace=namespace,
            keep=request.may_store,
        )
        if request.may_store and self._wants(request):
            request.arrival = self._in_flight.arrivals.begin(namespace, tokens)

    def _next_replica(self, *, without: Sequence[Replica] = ()) -> Replica:
        """Raises NoReplicaError."""
        replica = next((entry for entry in self._fleet.serving() if entry not in without), None)
        if replica is None:
            raise NoReplicaError
        return replica


def choose(lookups: Mapping[Replica, Lookup | None], settings: VllmSettings) -> Replica:
    """
    The best of at least one replica; load decides between equals, then the order of `lookups`.

    A replica is overloaded if it has `max_inflight` requests, or `max_imbalance` more than the idlest one; it
    is passed over unless all are.
    """
    idlest = min(replica.num_inflight for replica in lookups)
    allowed = [
        replica
        for replica in lookups
        if replica.num_inflight < settings.max_inflight
        and replica.num_inflight - idlest < settings.max_imbalance
    ]
    return min(allowed or lookups, key=lambda replica: (_prefill_s(lookups[replica]), replica.num_inflight))


_TAIL = 16  # tokens that vLLM computes itself, behind what the connector provides


def ticket_for(
    plan: Plan | NoPlan, prompt: TokenIds, *, request_id: str, namespace: str, keep: bool
) -> Ticket:
    """The plan, as the connector needs it. Without a plan the prompt may still become a donor."""
    copies: tuple[WireCopy, ...] = ()
    if isinstance(plan, Plan):
        copies = tuple(
            WireCopy(copy.segment_id, copy.offset, copy.length, copy.target_start, copy.source_position)
            for copy in plan.copies
        )
    return Ticket(
        request_id=request_id,
        namespace=namespace,
        prompt_digest=digest_of(prompt),
        num_tokens=len(prompt),
        exact_length=plan.exact_length if isinstance(plan, Plan) else 0,
        copies=copies,
        keep=keep,
        order=wire_order(plan) if isinstance(plan, Plan) else None,
    )


def wire_order(plan: Plan) -> WireOrder | None:
    """What the plan leaves to be chosen, as the connector needs it."""
    if plan.order is None:
        return None
    return WireOrder(
        pieces=tuple(WireSpan(piece.start, piece.end) for piece in plan.order.pieces),
        probes=plan.order.probes,
        num_tokens=plan.order.num_tokens,
        end=max(plan.num_tokens - _TAIL, plan.copies[-1].target.end),
    )


def _prefill_s(lookup: Lookup | None) -> float:
    """What the prefill should take with the plan found; without one, more than with any."""
    plan = lookup.plan if lookup is not None else None
    return plan.estimate.shared_s if isinstance(plan, Plan) else float("inf")
