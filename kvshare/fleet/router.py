"""
Chooses the replica of each request and plans the request there.

KV cannot move between replicas, so each replica has its own namespaces. A prompt is looked up in all of them
and goes to the replica with the shortest expected prefill that is not overloaded; without donors, to the
idlest replica.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.telemetry import Component, FallbackReason
from kvshare.vllm_protocol.messages import Ticket, WireCopy, WireOrder, WireSpan, digest_of

log = logging.getLogger(__name__)

_NUM_LAST_TOKENS = 16  # of a prompt: vLLM computes them itself
_PREFILL_S, _PATIENCE = 10.0, 4.0  # the least, and the factor on the expected prefill, of a wait for a donor
_RECONCILE_S = 0.25  # the longest wait of a conversation's next turn for its last answer to be stored


class Router:
    """Called for every request: renders and plans it, chooses its replica, counts it while it runs."""

    def __init__(self, sharing: Sharing, fleet: Fleet, in_flight: InFlight, settings: VllmSettings) -> None:
        self._sharing = sharing
        self._fleet = fleet
        self._in_flight = in_flight
        self._settings = settings

    async def render(self, path: str, body: bytes) -> list[RenderedPrompt] | None:
        """
        The prompts that vLLM would compute for a body sent to `path`; None if no replica has `/render`.

        Raises:  NoReplicaError, UpstreamError
        """
        self._idlest_replica()
        while replica := next((entry for entry in self._fleet.serving() if entry.renders), None):
            try:
                return await replica.vllm.render(path, body)
            except UpstreamError as exc:
                if exc.status not in NO_ROUTE:
                    raise
                if replica.renders:  # another request may have noticed meanwhile
                    log.warning(
                        "replica %s has no /render routes: /v1/responses and /v1/messages are not shared, "
                        "and chats are tokenized by /tokenize. To share them, start vLLM with "
                        "--enable-scale-out",
                        replica.name,
                    )
                replica.renders = False
        return None

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """Tokenize with vLLM's template and tokenizer. Raises NoReplicaError, UpstreamError."""
        return await self._idlest_replica().vllm.tokenize(body)

    async def route(self, request: RoutedRequest) -> Replica:
        """Plan a request and choose its replica; unshared if planning fails. Raises NoReplicaError."""
        prompt = request.prompt
        reason = Reason.OFF if request.mode is SharingMode.OFF else Reason.SHORT_PROMPT
        if prompt is not None and request.mode is not SharingMode.OFF:
            # Short prompts are planned, too: prompt and answer together may be long enough to be stored.
            if self._may_share(request):
                await self._in_flight.wait_reconciled(request.owner, prompt.token_ids, timeout_s=_RECONCILE_S)
                reason = Reason.NO_CONNECTOR  # unless there is a lookup
            try:
                replica, lookup = await self._find_or_wait(request)
                if replica is not None and replica.shares:
                    self._sharing.note_use(lookup)
                    self._set_plan(request, replica, lookup)
                    return replica
            except Exception as exc:  # noqa: BLE001  logged, without its message
                what = classes_and_places(exc)
                log.warning("planning failed, the request is served unshared; please report this: %s", what)
                self._sharing.telemetry.fallback(Component.PLANNING, FallbackReason.ERROR)
                reason = Reason.LOOKUP_FAILED
        request.plan, request.ticket = NoPlan(reason), None
        return self._idlest_replica()

    def reroute(self, request: RoutedRequest, tried: Sequence[Replica]) -> Replica:
        """
        Choose another replica, without a plan, after the last of `tried` failed.

        The failed one gets no requests until its vLLM answers again. Raises NoReplicaError.
        """
        failed = tried[-1]
        failed.models = None  # as if it had not answered yet
        self._sharing.telemetry.replica_failed(failed.name)
        request.plan, request.ticket = NoPlan(Reason.REPLICA_GONE), None
        return self._idlest_replica(without=tried)

    @contextmanager
    def sending(self, request: RoutedRequest, replica: Replica) -> Iterator[None]:
        """Count the request at its replica while inside. With a ticket, its report is expected afterwards."""
        self._fleet.advance_rotation()
        request.execution.replica, request.has_failed = replica.name, False
        request.was_alone, request.sent_at = replica.num_inflight == 0, time.perf_counter()
        replica.num_inflight += 1
        self._in_flight.add(request)
        try:
            yield
        finally:
            replica.num_inflight -= 1
            self._in_flight.end(request)

    def note_unshared(self, reason: Reason) -> None:
        """Count a request that cannot be planned, by reason."""
        self._sharing.telemetry.unshared(reason)

    async def explain(self, request: RoutedRequest) -> dict[str, Any]:
        """The plan and the replica this request would get; JSON-ready. Nothing is sent."""
        assert request.prompt is not None, "only tokenized requests can be explained"
        replica, lookup = await self._find(request)
        document = await asyncio.to_thread(
            explain_lookup, self._sharing, request.prompt, lookup, request.mode
        )
        return {**document, "replica": None if replica is None else replica.name}

    async def _find_or_wait(self, request: RoutedRequest) -> tuple[Replica | None, Lookup]:
        """Like `_find`, but wait for a similar prompt that any replica computes now, if that pays."""
        if request.prompt is None or not self._may_share(request):
            return await self._find(request)
        replica: Replica | None = None

        async def look_up() -> Lookup:
            nonlocal replica
            replica, lookup = await self._find(request)
            return lookup

        namespaces = [entry.namespace(request.owner).digest for entry in self._fleet.sharing()]
        lookup = await self._in_flight.arrivals.waited(
            namespaces, request.prompt.token_ids, request.mode, look_up
        )
        return replica, lookup

    def _may_share(self, request: RoutedRequest) -> bool:
        return request.prompt is not None and self._sharing.may_share(request.prompt, request.mode)

    async def _find(self, request: RoutedRequest) -> tuple[Replica | None, Lookup]:
        """The best replica and the lookup there; no replica if none shares."""
        sharing, unshared = self._fleet.sharing(), Lookup(NoPlan(Reason.NO_CONNECTOR))
        if not sharing:
            return None, unshared
        alone = len(sharing) == 1
        found = await asyncio.gather(*(self._look_up(request, each, embed=alone) for each in sharing))
        others = (replica for replica in self._fleet.serving() if not replica.shares)  # also since the lookup
        lookups = {**dict(zip(sharing, found, strict=True)), **dict.fromkeys(others, unshared)}
        best = choose(lookups, self._settings)
        if best.shares and not alone and isinstance(lookups[best].plan, NoPlan):
            # Embedding is expensive: done once, and only if the search by tokens found nothing.
            return best, await self._look_up(request, best, embed=True)
        return best, lookups[best]

    async def _look_up(self, request: RoutedRequest, replica: Replica, *, embed: bool) -> Lookup:
        """`embed`: also search by embedding."""
        assert request.prompt is not None, "checked by the callers"
        namespace = replica.namespace(request.owner).digest
        return await self._sharing.find_plan(namespace, request.prompt, request.mode, by_embedding=embed)

    def _set_plan(self, request: RoutedRequest, replica: Replica, lookup: Lookup) -> None:
        """Set plan and ticket. A ticket carries a plan, or asks the connector to retain KV, or both."""
        assert request.prompt is not None, "a lookup has a prompt"
        request.plan = lookup.plan
        if not isinstance(lookup.plan, Plan) and not request.may_store:
            return
        namespace, tokens = replica.namespace(request.owner).digest, request.prompt.token_ids
        ticket_id = uuid.uuid4().hex  # secret, as the private salt is derived from it
        request.ticket = ticket_for(
            lookup.plan, tokens, ticket_id=ticket_id, namespace=namespace, store=request.may_store
        )
        if request.may_store and self._may_share(request):
            request.arrival = self._in_flight.arrivals.begin(namespace, tokens)
            request.arrival.remaining = self._until_prefilled(len(tokens))

    def _until_prefilled(self, num_tokens: int) -> Callable[[], int]:
        """What is left of a prompt: all, until vLLM, which reports no progress, should have long finished."""
        expected_s = num_tokens / self._sharing.cost.rates.prefill_tokens_per_s
        until = time.monotonic() + max(_PREFILL_S, _PATIENCE * expected_s)
        return lambda: num_tokens if time.monotonic() < until else 0

    def _idlest_replica(self, *, without: Sequence[Replica] = ()) -> Replica:
        """Raises NoReplicaError."""
        replica = next((entry for entry in self._fleet.serving() if entry not in without), None)
        if replica is None:
            raise NoReplicaError
        return replica


def choose(lookups: Mapping[Replica, Lookup], settings: VllmSettings) -> Replica:
    """
    The replica with the shortest expected prefill; among equal ones that with fewest requests, then the
    first.

    Overloaded replicas are skipped unless all are: those with `max_inflight` requests, or `max_imbalance`
    more than the idlest one.
    """
    idlest = min(replica.num_inflight for replica in lookups)
    allowed = [
        replica
        for replica in lookups
        if replica.num_inflight < settings.max_inflight
        and replica.num_inflight - idlest < settings.max_imbalance
    ]

    def prefill_s(replica: Replica) -> float:
        plan = lookups[replica].plan
        return plan.estimate.shared_s if isinstance(plan, Plan) else math.inf

    return min(allowed or lookups, key=lambda replica: (prefill_s(replica), replica.num_inflight))


def ticket_for(
    plan: Plan | NoPlan, prompt: TokenIds, *, ticket_id: str, namespace: str, store: bool
) -> Ticket:
    """The plan for the connector. Without a plan the prompt may still be retained."""
    ticket = Ticket(ticket_id, namespace, digest_of(prompt), len(prompt), store=store)
    if isinstance(plan, NoPlan):
        return ticket
    copies = (
        WireCopy(copy.segment_id, copy.offset, copy.length, copy.target_start, copy.source_position)
        for copy in plan.copies
    )
    return replace(ticket, exact_length=plan.exact_length, copies=tuple(copies), order=wire_order(plan))


def wire_order(plan: Plan) -> WireOrder | None:
    """The plan's repair order for the connector, which fills slots up to `end`; vLLM computes the rest."""
    if plan.order is None:
        return None
    return WireOrder(
        stretches=tuple(WireSpan(stretch.start, stretch.end) for stretch in plan.order.stretches),
        probes=plan.order.probes,
        num_tokens=plan.order.num_tokens,
        end=max(plan.num_tokens - _NUM_LAST_TOKENS, plan.copies[-1].target.end),
    )
