"""
Requests in the fleet, and which of those with a ticket are not reported in a journal yet.

    sent -> answered -> reported in the journal -> in tree and index     the request is forgotten
                     -> expired                                          it never reached vLLM's scheduler
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from delta_tree import Node, NodeId, TokenIds, common_prefix_length
from kvshare.namespace import Owner
from kvshare.reasons import Reason
from kvshare.requests import Prompt, SharingMode, SharingReport, StoredPrompt
from kvshare.sharing.arrivals import Arrival, Arrivals
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import TICKET_KEY, FinishedReport, Ticket
from kvshare.vllm_protocol.salts import owner_salt, private_salt

_UNPLANNED = NoPlan(Reason.OFF)
_ANSWER_HEADER = 16  # last tokens of a prompt, which a template may write differently once they are answered


@dataclass(slots=True, eq=False)
class Execution:
    """Where a request ran, and its report. Outlives the request and holds no tokens."""

    replica: str = ""  # name of the last replica it was sent to
    finished: FinishedReport | None = None  # the report in the journal, without tokens and segments
    stored: StoredPrompt = field(default_factory=StoredPrompt)


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """
    One request and its state, from the client to the journal.

    A request without a prompt is not planned, only relayed with its owner's salt.
    """

    owner: Owner
    prompt: Prompt | None = None
    mode: SharingMode = SharingMode.OFF
    may_store: bool = False
    unique_id: str = ""  # in the access log and `GET /admin/requests`

    # Decided by the router.
    execution: Execution = field(default_factory=Execution)
    plan: Plan | NoPlan = _UNPLANNED
    ticket: Ticket | None = None

    # Observed while it is in flight.
    was_alone: bool = False  # the replica had no other request when it was sent
    has_failed: bool = False  # it did not reach vLLM, or vLLM answered with an error
    sent_at: float = 0.0
    first_token_s: float | None = None  # of a streamed answer
    ended_at: float | None = None  # None while the answer runs
    arrival: Arrival | None = None  # similar prompts wait for this one
    prompt_node: Node | None = None  # set when the prompt is prefilled and stored
    prompt_not_stored: bool = False  # then its answer is not stored either
    is_reported: bool = False  # the journal reported it; tree and index may not have it yet
    reconciled: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is forgotten

    @property
    def replica(self) -> str:
        return self.execution.replica

    @property
    def report(self) -> SharingReport | None:
        """How much the plan shares; None without a prompt."""
        return None if self.prompt is None else Lookup(self.plan).report(self.prompt.num_tokens)

    @property
    def salt(self) -> str:
        """vLLM's cache_salt: unique for approximate KV, else that of the owner."""
        if self.ticket is None or self.ticket.is_exact:
            return owner_salt(self.owner)
        return private_salt(self.ticket.ticket_id)

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """
        vLLM's `kv_transfer_params`, if there is a ticket.

        An approximate plan adds the number of reused tokens in vLLM's own parameter. Without it vLLM would
        also count the tokens that the connector computed as cached.
        """
        if self.ticket is None:
            return None
        params: dict[str, Any] = {TICKET_KEY: self.ticket.to_json()}
        if not self.ticket.is_exact and self.report is not None:
            params |= {"do_remote_prefill": True, "remote_prefill_cached_tokens": self.report.num_cached}
        return params

    def note_prefilled(self) -> None:
        """Its first token arrived: similar prompts only wait until it is stored."""
        if self.arrival is not None:
            self.arrival.remaining = lambda: 0


class InFlight:
    """The requests with a ticket that are not forgotten yet. Its length: those not reported yet."""

    def __init__(
        self, arrivals: Arrivals, *, expiry_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.arrivals = arrivals
        self._expiry_s = expiry_s
        self._clock = clock
        self._by_ticket_id: dict[str, RoutedRequest] = {}

    def __len__(self) -> int:
        return sum(not request.is_reported for request in self._by_ticket_id.values())

    def add(self, request: RoutedRequest) -> None:
        """Expect the report of a request; one without a ticket is not reported."""
        if request.ticket is not None:
            self._by_ticket_id[request.ticket.ticket_id] = request

    def end(self, request: RoutedRequest) -> None:
        """
        The answer has ended. A failed request is not reported. If the client disconnected before the first
        token, no prompt is stored, so similar prompts stop waiting.
        """
        if request.arrival is not None and request.arrival.remaining():
            self.end_arrival(request)
        if request.ticket is None or (request.has_failed and not request.is_reported):
            self.forget(request)
        elif request.ended_at is None:
            request.ended_at = self._clock()

    def end_arrival(self, request: RoutedRequest, *, stored: bool = False) -> None:
        """Wake similar prompts: this one is stored, or will not be. Idempotent."""
        if request.arrival is not None:
            self.arrivals.end(request.arrival, stored=stored)

    def find(self, ticket_id: str, replica: str) -> RoutedRequest | None:
        """The unreported request with this ticket at this replica, or None."""
        request = self._by_ticket_id.get(ticket_id)
        if request is None or request.replica != replica or request.is_reported:
            return None
        return request

    def take(self, ticket_id: str, replica: str) -> RoutedRequest | None:
        """The same, now marked as reported: the next turn after it waits until the caller forgets it."""
        if (request := self.find(ticket_id, replica)) is not None:
            request.is_reported = True
        return request

    def donors(self) -> frozenset[NodeId]:
        """The donors of all tickets in flight: they must not be evicted."""
        plans = (request.plan for request in self._by_ticket_id.values())
        return frozenset(donor for plan in plans if isinstance(plan, Plan) for donor in plan.donors)

    def forget(self, request: RoutedRequest) -> None:
        """Remove a request that will not be reported, or whose report is in tree and index."""
        request.execution.stored.is_settled = True
        if request.ticket is not None:
            self._by_ticket_id.pop(request.ticket.ticket_id, None)
        self.end_arrival(request)
        request.reconciled.set()

    def forget_replica(self, replica: str) -> None:
        """Forget the requests that this replica has not reported: it will not report them."""
        for request in tuple(self._by_ticket_id.values()):
            if request.replica == replica and not request.is_reported:
                self.forget(request)

    def expire(self) -> int:
        """Forget requests whose report is overdue. Returns how many."""
        unreported = (request for request in self._by_ticket_id.values() if not request.is_reported)
        late = [request for request in unreported if self._age_s(request) >= self._expiry_s]
        for request in late:
            self.forget(request)
        return len(late)

    async def wait_reconciled(self, owner: Owner, token_ids: TokenIds, *, timeout_s: float) -> None:
        """
        Wait, at most `timeout_s`, for the report of the answer that this prompt continues, if it just ended.

        Other answers are not waited for. On a busy vLLM their reports come steps later, and only the next
        turn of a conversation can use what they add: every prompt is stored when it is prefilled.
        """
        awaited = [
            entry
            for entry in self._by_ticket_id.values()
            if entry.owner == owner
            and (entry.is_reported or 0 <= self._age_s(entry) < timeout_s)
            and _is_next_turn(token_ids, entry.prompt)
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for entry in awaited:
                    await entry.reconciled.wait()

    def _age_s(self, request: RoutedRequest) -> float:
        """Seconds since its answer ended; negative while it runs."""
        return -1.0 if request.ended_at is None else self._clock() - request.ended_at


def _is_next_turn(token_ids: TokenIds, earlier: Prompt | None) -> bool:
    """Whether a prompt is longer than an earlier one and begins with it, up to the header of the answer."""
    if earlier is None or len(token_ids) <= earlier.num_tokens:
        return False
    equal = common_prefix_length(earlier.token_ids, token_ids)
    return equal >= max(1, earlier.num_tokens - _ANSWER_HEADER)
