"""
Requests on their way through the fleet, and what is still unknown of those that were sent with a ticket.

    sent -> answered -> reported in the journal -> in tree and index     nothing more is known of it then
                     -> expired                                          it never reached vLLM's scheduler
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from delta_tree import Node, NodeId
from kvshare.namespace import Owner
from kvshare.reasons import Reason
from kvshare.requests import Prompt, SharingMode, SharingReport, StoredPrompt
from kvshare.sharing.arrivals import Arrival, Arrivals
from kvshare.sharing.pipeline import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import TICKET_KEY, Finished, Ticket
from kvshare.vllm_protocol.salts import owner_salt, private_salt

_UNPLANNED = NoPlan(Reason.OFF)


@dataclass(slots=True, eq=False)
class Execution:
    """Where a request ran and what was reported of it. Outlives the request and holds no token of it."""

    replica: str = ""  # name of the one that it was sent to last
    finished: Finished | None = None  # in the journal, without tokens and segments
    stored: StoredPrompt = field(default_factory=StoredPrompt)


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """
    One request, from the client to the journal: what the client asked for, what was decided, what was seen.

    Without a prompt it is not planned, only sent on under its owner's salt.
    """

    owner: Owner
    prompt: Prompt | None = None
    mode: SharingMode = SharingMode.OFF
    may_store: bool = False
    client_salt: str | None = None
    request_id: str = ""  # as its client is given it

    # Decided by the router.
    execution: Execution = field(default_factory=Execution)
    plan: Plan | NoPlan = _UNPLANNED
    ticket: Ticket | None = None

    # Seen while it is in flight.
    was_alone: bool = False  # no other request ran at the replica when it was sent
    was_refused: bool = False  # it did not get through, or vLLM answered with an error
    sent_at: float = 0.0
    first_token_s: float | None = None  # of a streamed answer
    ended_at: float | None = None  # None while the answer runs
    arrival: Arrival | None = None  # others like it wait for this
    prompt_node: Node | None = None  # once it is prefilled and stored
    prompt_was_refused: bool = False  # it is not to be stored
    is_reported: bool = False  # and on its way into tree and index
    reconciled: asyncio.Event = field(default_factory=asyncio.Event)  # nothing more will be known of it

    @property
    def replica(self) -> str:
        return self.execution.replica

    @property
    def report(self) -> SharingReport | None:
        """What is planned; None for one without a prompt."""
        return None if self.prompt is None else Lookup(self.plan).report(self.prompt.num_tokens)

    @property
    def salt(self) -> str:
        """Approximate KV gets a salt that no other request has; anything else keeps its owner's."""
        if self.ticket is None or self.ticket.is_exact:
            return owner_salt(self.owner, self.client_salt)
        return private_salt(self.ticket.request_id)

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """
        vLLM's `kv_transfer_params`, if there is a ticket. An approximate plan also gives the number of reused
        tokens, in vLLM's own parameter: without it vLLM would count all tokens of the connector as cached,
        those that the connector computed included.
        """
        if self.ticket is None:
            return None
        params: dict[str, Any] = {TICKET_KEY: self.ticket.to_json()}
        if not self.ticket.is_exact and self.report is not None:
            params |= {"do_remote_prefill": True, "remote_prefill_cached_tokens": self.report.num_cached}
        return params

    def note_prefilled(self) -> None:
        """Its first token is there: who waits for it need only wait until it is stored."""
        if self.arrival is not None:
            self.arrival.remaining = lambda: 0


class InFlight:
    """Requests with a ticket until nothing more will be known of them. Its length: those not reported yet."""

    def __init__(
        self, arrivals: Arrivals, *, expiry_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.arrivals = arrivals
        self._expiry_s = expiry_s
        self._clock = clock
        self._by_id: dict[str, RoutedRequest] = {}  # by the ticket's id

    def __len__(self) -> int:
        return sum(not request.is_reported for request in self._by_id.values())

    @property
    def num_unreconciled(self) -> int:
        return len(self._by_id)

    def add(self, request: RoutedRequest) -> None:
        """A request without a ticket is not reported: nothing is waited for."""
        if request.ticket is not None:
            self._by_id[request.ticket.request_id] = request

    def end(self, request: RoutedRequest) -> None:
        """
        The answer is over. A refused request will not be reported; one whose client left before the first
        token leaves no prompt.
        """
        if request.arrival is not None and request.arrival.remaining():
            self.end_arrival(request)
        if request.ticket is None or (request.was_refused and not request.is_reported):
            self.forget(request)
        elif request.ended_at is None:
            request.ended_at = self._clock()

    def end_arrival(self, request: RoutedRequest, *, stored: bool = False) -> None:
        """Others find its prompt now, or never. Idempotent."""
        if request.arrival is not None:
            self.arrivals.end(request.arrival, stored=stored)

    def find(self, request_id: str, replica: str) -> RoutedRequest | None:
        """The request that a replica will say more of; None where there is none, or it was sent elsewhere."""
        request = self._by_id.get(request_id)
        if request is None or request.replica != replica or request.is_reported:
            return None
        return request

    def take(self, request_id: str, replica: str) -> RoutedRequest | None:
        """
        The request that a replica reports; None where there is none, or it was sent elsewhere.

        Its owner's next requests wait until the caller calls `forget`.
        """
        if (request := self.find(request_id, replica)) is not None:
            request.is_reported = True
        return request

    def donors(self) -> frozenset[NodeId]:
        """The prompts whose KV the tickets that are out refer to: they must not be evicted."""
        plans = (request.plan for request in self._by_id.values())
        return frozenset(donor for plan in plans if isinstance(plan, Plan) for donor in plan.donors)

    def forget(self, request: RoutedRequest) -> None:
        """It will not be reported, or what was reported of it can be found by others now."""
        request.execution.stored.is_settled = True
        if request.ticket is not None:
            self._by_id.pop(request.ticket.request_id, None)
        self.end_arrival(request)
        request.reconciled.set()

    def forget_replica(self, replica: str) -> None:
        """This replica will report none of its requests any more."""
        for request in tuple(self._by_id.values()):
            if request.replica == replica and not request.is_reported:
                self.forget(request)

    def expire(self) -> int:
        """Forget requests that will not be reported any more. Returns how many."""
        unreported = (request for request in self._by_id.values() if not request.is_reported)
        late = [request for request in unreported if self._age_s(request) >= self._expiry_s]
        for request in late:
            self.forget(request)
        return len(late)

    async def wait_reconciled(self, owner: Owner, *, timeout_s: float) -> None:
        """Wait for the reports of an owner's answers that ended just now, at most `timeout_s`."""
        own = (request for request in self._by_id.values() if request.owner == owner)
        awaited = [entry for entry in own if entry.is_reported or 0 <= self._age_s(entry) < timeout_s]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for entry in awaited:
                    await entry.reconciled.wait()

    def _age_s(self, request: RoutedRequest) -> float:
        """Seconds since its answer was over; negative while it runs."""
        return -1.0 if request.ended_at is None else self._clock() - request.ended_at
