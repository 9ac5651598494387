"""
Chooses the replica of each request and plans the request there.

KV does not move between replicas, so each replica has its own namespaces; replicas that share a store have
their namespaces in common. A prompt is looked up in all of them and goes to the replica with the shortest
expected prefill that is not overloaded; without donors, to the idlest replica.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvshare.fleet.in_flight import InFlight
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.replica import Fleet, Replica
from kvshare.fleet.routed_request import Incoming, Routed, RoutedRequest
from kvshare.fleet.tickets import ticket_for
from kvshare.reasons import Reason
from kvshare.requests import SharingMode
from kvshare.safe_logging import classes_and_places
from kvshare.settings import VllmSettings
from kvshare.sharing.control import Controller
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.telemetry import Component, FallbackReason
from kvshare.vllm_protocol.messages import Ticket

log = logging.getLogger(__name__)

_PREFILL_S, _PATIENCE = 10.0, 4.0  # the least, and the factor on the expected prefill, of a wait for a donor
_SENT_S = 0.02  # a request is sent by then
_RECONCILE_S = 0.25  # the longest wait of a conversation's next turn for its last answer to be stored


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The best replica for a prompt, None if none shares, and what was looked up there."""

    replica: Replica | None
    lookup: Lookup


class Router:
    """Called for every request: plans it, chooses its replica, counts it while it runs."""

    def __init__(
        self,
        sharing: Sharing,
        control: Controller,
        fleet: Fleet,
        in_flight: InFlight,
        settings: VllmSettings,
        *,
        tier: RemoteTier,
    ) -> None:
        self._sharing = sharing
        self._control = control
        self._fleet = fleet
        self._in_flight = in_flight
        self._settings = settings
        self._tier = tier

    @contextmanager
    def controlled(self, request: RoutedRequest) -> Iterator[None]:
        """Let the controller decide how a request is served, from its arrival to its end: while inside."""
        incoming, progress, sharing = request.incoming, request.progress, self._fleet.sharing()
        if incoming.prompt is None or not (sharing and incoming.is_controlled and self._may_share(incoming)):
            yield
            return
        num_in_flight = 1 + round(sum(replica.num_inflight for replica in sharing) / len(sharing))
        with self._control.take(incoming.prompt.num_tokens, num_in_flight) as request.treatment:
            yield
            if progress.is_complete and request.routed.plan.reason is not Reason.REPLICA_GONE:
                request.treatment.complete(progress.num_output)

    async def route(self, request: RoutedRequest) -> Replica:
        """Plan a request and choose its replica; unshared if planning fails. Raises NoReplicaError."""
        incoming, prompt = request.incoming, request.incoming.prompt
        reason = Reason.OFF if incoming.mode is SharingMode.OFF else Reason.SHORT_PROMPT
        if (refusal := request.treatment.refusal) is not None:
            reason = refusal
        elif prompt is not None and incoming.mode is not SharingMode.OFF:
            # Short prompts are planned, too: prompt and answer together may be long enough to be stored.
            if self._may_share(incoming):
                await self._in_flight.wait_reconciled(
                    incoming.owner, prompt.token_ids, timeout_s=_RECONCILE_S
                )
                reason = self._fleet.why_none_shares  # unless there is a lookup
            try:
                route = await self._find_or_wait(incoming)
                request.progress.lookup_seconds = route.lookup.stage_seconds
                if route.replica is not None and route.replica.shares:
                    request.progress.queue_s = route.replica.queue(self._sharing.cost.rates).computing_s
                    routed = self._planned(self._as_controlled(request, route), route.replica, route.lookup)
                    if routed.ticket is None:
                        routed = replace(routed, ticket=self._comparing(request, route.replica))
                    request.routed = replace(routed, lookup=route.lookup)
                    return route.replica
            except Exception as exc:  # noqa: BLE001  logged, without its message
                what = classes_and_places(exc)
                log.warning("planning failed, the request is served unshared; please report this: %s", what)
                self._sharing.telemetry.fallback(Component.PLANNING, FallbackReason.ERROR)
                reason = Reason.LOOKUP_FAILED
        replica = self._fleet.idlest()
        request.routed = Routed(NoPlan(reason), self._comparing(request, replica))
        return replica

    def _comparing(self, request: RoutedRequest, replica: Replica) -> Ticket | None:
        """
        Return a ticket that shares and stores nothing: with drafts, the replica reports how many steps the
        answer takes. For what is served unshared as an experiment, and for what might have been shared and
        finds nothing, so that both kinds are of all requests.
        """
        prompt, treatment = request.incoming.prompt, request.treatment
        is_compared = treatment.block is not None and treatment.refusal is not Reason.REDUCED
        if prompt is None or not is_compared or not replica.shares or not replica.speculates:
            return None
        namespace = replica.namespace(request.incoming.owner).digest
        plan, ticket_id = NoPlan(Reason.EXPERIMENT), uuid.uuid4().hex
        return ticket_for(plan, prompt.token_ids, ticket_id=ticket_id, namespace=namespace, store=False)

    def reroute(self, request: RoutedRequest, tried: Sequence[Replica]) -> Replica:
        """
        Choose another replica, without a plan, after the last of `tried` failed.

        The failed one gets no requests until its vLLM answers again. Raises NoReplicaError.
        """
        failed = tried[-1]
        failed.models = None  # as if it had not answered yet
        self._sharing.telemetry.replica_failed(failed.name)
        request.routed = Routed(NoPlan(Reason.REPLICA_GONE), arrival=request.routed.arrival)
        return self._fleet.idlest(without=tried)

    @contextmanager
    def sending(self, request: RoutedRequest, replica: Replica) -> Iterator[None]:
        """Count the request at its replica while inside. With a ticket, its report is expected afterwards."""
        self._fleet.advance_rotation()
        request.execution.replica = replica.name
        replica.num_inflight += 1
        self._in_flight.add(request)
        try:
            with replica.computing(request), self._noting_use(request.routed.lookup):
                yield
        finally:
            replica.num_inflight -= 1
            self._in_flight.end(request)

    @contextmanager
    def _noting_use(self, lookup: Lookup | None) -> Iterator[None]:
        """Note a lookup's use after the request was sent, which need not wait for that; at the latest now."""
        if lookup is None:
            yield
            return
        loop = asyncio.get_running_loop()
        later = loop.call_later(_SENT_S, self._sharing.note_use, lookup)
        try:
            yield
        finally:
            if later.when() > loop.time():
                later.cancel()
                self._sharing.note_use(lookup)

    async def find(self, incoming: Incoming) -> Route:
        """Look a prompt up in every replica that shares. Changes nothing."""
        sharing, unshared = self._fleet.sharing(), Lookup(NoPlan(self._fleet.why_none_shares))
        if not sharing:
            return Route(None, unshared)
        alone = len(sharing) == 1
        found = await asyncio.gather(*(self._look_up(incoming, each, embed=alone) for each in sharing))
        others = (replica for replica in self._fleet.serving() if not replica.shares)  # also since the lookup
        lookups = {**dict(zip(sharing, found, strict=True)), **dict.fromkeys(others, unshared)}
        best = choose(lookups, self._settings)
        if best.shares and not alone and isinstance(lookups[best].plan, NoPlan):
            # Embedding is expensive: done once, and only if the search by tokens found nothing.
            return Route(best, await self._look_up(incoming, best, embed=True))
        return Route(best, lookups[best])

    async def _find_or_wait(self, incoming: Incoming) -> Route:
        """Like `find`, but wait for a similar prompt that any replica computes now, if that pays."""
        prompt = incoming.prompt
        is_short = prompt is None or prompt.num_tokens < self._sharing.shortest_that_pays
        if prompt is None or is_short or not self._may_share(incoming):
            return await self.find(incoming)
        waited = await self._in_flight.arrivals.waited(
            [replica.namespace(incoming.owner).digest for replica in self._fleet.sharing()],
            prompt.token_ids,
            incoming.mode,
            lambda: self.find(incoming),
            num_reused=lambda route: route.lookup.report(prompt.num_tokens).num_cached,
        )
        route = waited.result
        return replace(route, lookup=route.lookup.after_waiting(waited.seconds))

    def _may_share(self, incoming: Incoming) -> bool:
        return incoming.prompt is not None and self._sharing.may_share(incoming.prompt, incoming.mode)

    async def _look_up(self, incoming: Incoming, replica: Replica, *, embed: bool) -> Lookup:
        """`embed`: also search by embedding."""
        assert incoming.prompt is not None, "checked by the callers"
        namespace = replica.namespace(incoming.owner).digest
        memory = self._tier.memories[replica.name]
        queue = replace(replica.queue(self._sharing.cost.rates), on_disk=memory.on_disk)
        lookup = await self._sharing.find_plan(
            namespace,
            incoming.prompt,
            incoming.mode,
            max_deviation=incoming.max_deviation,
            by_embedding=embed,
            queue=queue,
        )
        if not replica.shares_store or not isinstance(lookup.plan, Plan):
            return lookup
        is_held = all(copy.segment_id in memory.segments for copy in lookup.plan.copies)
        return lookup if is_held else replace(lookup, plan=NoPlan(Reason.KV_ELSEWHERE))

    def _as_controlled(self, request: RoutedRequest, route: Route) -> Incoming:
        """Return the request as asked for, but stored only if the controller permits it."""
        incoming, prompt, replica = request.incoming, request.incoming.prompt, route.replica
        assert prompt is not None, "a lookup has a prompt"
        assert replica is not None, "found by the lookup"
        may_save = self._control.may_save(
            request.treatment,
            replica.namespace(incoming.owner).digest,
            prompt.token_ids,
            num_reused=route.lookup.report(prompt.num_tokens).num_cached,
        )
        return replace(incoming, may_store=incoming.may_store and may_save)

    def _planned(self, incoming: Incoming, replica: Replica, lookup: Lookup) -> Routed:
        """Plan and ticket. A ticket carries a plan, or asks the connector to retain KV, or both."""
        assert incoming.prompt is not None, "a lookup has a prompt"
        if not isinstance(lookup.plan, Plan) and not incoming.may_store:
            return Routed(lookup.plan)
        namespace, tokens = replica.namespace(incoming.owner).digest, incoming.prompt.token_ids
        plan, sharing = lookup.plan, self._sharing
        disk_s = (
            sharing.fetching.patience_s(plan, sharing.limits.threshold) if isinstance(plan, Plan) else 0.0
        )
        ticket = ticket_for(
            plan,
            tokens,
            ticket_id=uuid.uuid4().hex,  # secret, as the private salt is derived from it
            namespace=namespace,
            store=incoming.may_store,
            disk_s=disk_s,
        )
        if not incoming.may_store or not self._may_share(incoming):
            return Routed(lookup.plan, ticket)
        remaining = self._until_prefilled(len(tokens))
        arrival = self._in_flight.arrivals.begin(namespace, tokens)
        arrival.remaining = remaining
        return Routed(lookup.plan, ticket, arrival)

    def _until_prefilled(self, num_tokens: int) -> Callable[[], int]:
        """Make a function for the tokens left: all, until vLLM, which reports no progress, must be done."""
        expected_s = self._sharing.cost.rates.full_s(num_tokens)
        until = time.monotonic() + max(_PREFILL_S, _PATIENCE * expected_s)
        return lambda: num_tokens if time.monotonic() < until else 0


def choose(lookups: Mapping[Replica, Lookup], settings: VllmSettings) -> Replica:
    """
    Return the replica with the shortest expected prefill; among equal ones that with fewest requests, then
    the first.

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
