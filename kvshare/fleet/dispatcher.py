"""
Plans requests and chooses their replicas: the part of the vLLM engine that is on the way of every request.

Namespaces are a replica's, as KV cannot move: a prompt is looked up in each, and goes where it is cheapest.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvshare.errors import NoReplicaError
from kvshare.fleet.dispatch import Dispatch, Flight, Order, namespace_at
from kvshare.fleet.fleet import Fleet
from kvshare.fleet.pending import Pending, PendingTickets
from kvshare.fleet.replica import Replica
from kvshare.fleet.routing import LoadLimits, Option, choose
from kvshare.fleet.tickets import salt_for, ticket_for
from kvshare.requests import SharingMode, SharingReport
from kvshare.sharing.explain import Planning, explanation
from kvshare.sharing.pipeline import Lookup, Sharing
from kvshare.sharing.plan import NoPlan
from kvshare.vllm_protocol.salts import owner_salt

log = logging.getLogger(__name__)

_SETTLE_S = 0.25  # a prompt is kept after its answer; who asks again at once waits for that, so long


class Dispatcher:
    """Decides where a request goes and with what ticket, and keeps the tickets that are out."""

    def __init__(self, sharing: Sharing, fleet: Fleet, pending: PendingTickets, limits: LoadLimits) -> None:
        self._sharing = sharing
        self._fleet = fleet
        self._pending = pending
        self._limits = limits

    async def dispatch(self, order: Order) -> Dispatch:
        """
        Plan a request and choose its replica. Whatever fails in planning, it goes unshared.

        Raises:  NoReplicaError
        """
        option, reason = None, None
        if order.prompt is not None and self._sharing.wants(order.prompt, order.mode):
            await self._pending.caught_up(order.owner, timeout_s=_SETTLE_S)
            try:
                option = await self._find(order)
                reason = "no_connector"  # unless there is a lookup
            except Exception as exc:
                log.warning("planning failed, the request is served without it", exc_info=exc)
                self._sharing.counters["fallback:planning:error"] += 1
                reason = "lookup_failed"
        elif order.prompt is not None:
            reason = "off" if order.mode is SharingMode.OFF else "short_prompt"
        if option is not None and option.replica.serves and option.lookup is not None:
            self._sharing.note_use(option.lookup)
            return self._planned(order, option, option.lookup)
        return self._unplanned(order, reason)

    @contextmanager
    def running(self, dispatch: Dispatch) -> Iterator[Flight]:
        """Counts the request at its replica; its ticket is out until the replica tells its end."""
        flight, replica, pending = Flight(dispatch), dispatch.replica, dispatch.pending
        self._fleet.advance_rotation()
        replica.num_inflight += 1
        if pending is not None:
            self._pending.add(pending)
        try:
            yield flight
        finally:
            replica.num_inflight -= 1
            if pending is not None:
                self._pending.end(pending, was_refused=flight.was_refused)

    async def explain(self, order: Order) -> dict[str, Any]:
        """The plan this request would get, and where; a JSON-ready document. Nothing is sent."""
        assert order.prompt is not None, "only what is tokenized can be explained"
        option = await self._find(order)
        lookup = option.lookup if option is not None else None
        if lookup is None:
            lookup = Lookup(NoPlan("no_connector"))
        nodes = []
        if option is not None:
            nodes = self._sharing.own_nodes(option.namespace, lookup.candidates)
        planning = Planning(
            self._sharing.tree.segment,
            self._sharing.limits,
            self._sharing.cost.rates,
            approximate=order.mode is SharingMode.APPROX,
        )
        document = await asyncio.to_thread(explanation, lookup, order.prompt.token_ids, nodes, planning)
        return {**document, "replica": None if option is None else option.replica.name}

    async def _find(self, order: Order) -> Option | None:
        """The best plan, or the replica to do without; None if no replica shares."""
        replicas = self._fleet.sharing()
        if not replicas:
            return None
        alone = len(replicas) == 1
        options = await asyncio.gather(
            *(self._look_up(order, replica, by_meaning=alone) for replica in replicas)
        )
        unplanned = [Option(replica) for replica in self._fleet.serving() if not replica.shares]
        best = choose([*options, *unplanned], self._limits)
        if not alone and best.lookup is not None and isinstance(best.lookup.plan, NoPlan):
            # Embedding is dear: only where tokens found nothing, and once.
            return await self._look_up(order, best.replica, by_meaning=True)
        return best

    async def _look_up(self, order: Order, replica: Replica, *, by_meaning: bool) -> Option:
        assert order.prompt is not None, "checked by the callers"
        namespace = namespace_at(replica, order.owner).digest
        lookup = await self._sharing.find_plan(namespace, order.prompt, order.mode, by_meaning=by_meaning)
        return Option(replica, lookup, namespace)

    def _planned(self, order: Order, option: Option, lookup: Lookup) -> Dispatch:
        """With a ticket: for the plan, or for the leave to keep the prompt, or for both."""
        assert order.prompt is not None, "a lookup has a prompt"
        prompt, replica = order.prompt, option.replica
        report = lookup.report(prompt.num_tokens)
        if isinstance(lookup.plan, NoPlan) and not order.keep:
            return Dispatch(replica, owner_salt(order.owner, order.client_salt), report=report)
        ticket = ticket_for(
            lookup.plan,
            prompt.token_ids,
            request_id=uuid.uuid4().hex,  # not the client's, which may come twice
            namespace=option.namespace,
            keep=order.keep,
        )
        pending = Pending(
            ticket=ticket,
            replica=replica.name,
            owner=order.owner,
            prompt=prompt.token_ids,
            text=prompt.text,
            plan=lookup.plan,
            was_alone=replica.num_inflight == 0,
        )
        return Dispatch(replica, salt_for(ticket, order.owner, order.client_salt), ticket, pending, report)

    def _unplanned(self, order: Order, reason: str | None) -> Dispatch:
        serving = self._fleet.serving()
        if not serving:
            raise NoReplicaError
        report = None
        if order.prompt is not None:
            report = SharingReport(0, 0, order.prompt.num_tokens, 0, "full", reason)
        return Dispatch(serving[0], owner_salt(order.owner, order.client_salt), report=report)
