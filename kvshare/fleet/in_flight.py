"""
The requests in the fleet that have a ticket and are not reported in a journal yet.

    sent -> answered -> reported in the journal -> in tree and index     the request is forgotten
                     -> expired                                          it never reached vLLM's scheduler
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from delta_tree import NodeId, TokenIds, common_prefix_length
from kvshare.fleet.routed_request import RoutedRequest
from kvshare.namespace import Owner
from kvshare.requests import Prompt
from kvshare.sharing.arrivals import Arrivals
from kvshare.sharing.plan import Plan

_ANSWER_HEADER = 16  # last tokens of a prompt, which a template may write differently once they are answered


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
        return sum(not request.progress.is_reported for request in self._by_ticket_id.values())

    def add(self, request: RoutedRequest) -> None:
        """Expect the report of a request; one without a ticket is not reported."""
        if request.routed.ticket is not None:
            self._by_ticket_id[request.routed.ticket.ticket_id] = request

    def end(self, request: RoutedRequest) -> None:
        """
        The answer has ended. A failed request is not reported. If the client disconnected before the first
        token, no prompt is stored, so similar prompts stop waiting.
        """
        arrival, progress = request.routed.arrival, request.progress
        if arrival is not None and arrival.remaining():
            self.end_arrival(request)
        if request.routed.ticket is None or (progress.has_failed and not progress.is_reported):
            self.forget(request)
        elif progress.ended_at is None:
            progress.ended_at = self._clock()

    def end_arrival(self, request: RoutedRequest, *, stored: bool = False) -> None:
        """Wake similar prompts: this one is stored, or will not be. Idempotent."""
        if request.routed.arrival is not None:
            self.arrivals.end(request.routed.arrival, stored=stored)

    def find(self, ticket_id: str, replica: str) -> RoutedRequest | None:
        request = self._by_ticket_id.get(ticket_id)
        if request is None or request.replica != replica or request.progress.is_reported:
            return None
        return request

    def take(self, ticket_id: str, replica: str) -> RoutedRequest | None:
        """The same, now marked as reported: the next turn after it waits until the caller forgets it."""
        if (request := self.find(ticket_id, replica)) is not None:
            request.progress.is_reported = True
        return request

    def donors(self) -> frozenset[NodeId]:
        """Return the donors of all tickets in flight: they must not be evicted."""
        plans = (request.routed.plan for request in self._by_ticket_id.values())
        return frozenset(donor for plan in plans if isinstance(plan, Plan) for donor in plan.donors)

    def forget(self, request: RoutedRequest) -> None:
        """Remove a request that will not be reported, or whose report is in tree and index."""
        request.execution.stored.is_settled = True
        if request.routed.ticket is not None:
            self._by_ticket_id.pop(request.routed.ticket.ticket_id, None)
        self.end_arrival(request)
        request.progress.reconciled.set()

    def forget_replica(self, replica: str) -> None:
        """Forget the requests that this replica has not reported: it will not report them."""
        for request in tuple(self._by_ticket_id.values()):
            if request.replica == replica and not request.progress.is_reported:
                self.forget(request)

    def expire(self) -> int:
        """Forget requests whose report is overdue. Returns how many."""
        unreported = (request for request in self._by_ticket_id.values() if not request.progress.is_reported)
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
            if entry.incoming.owner == owner
            and (entry.progress.is_reported or 0 <= self._age_s(entry) < timeout_s)
            and _is_next_turn(token_ids, entry.incoming.prompt)
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for entry in awaited:
                    await entry.progress.reconciled.wait()

    def _age_s(self, request: RoutedRequest) -> float:
        """Seconds since its answer ended; negative while it runs."""
        return -1.0 if request.progress.ended_at is None else self._clock() - request.progress.ended_at


def _is_next_turn(token_ids: TokenIds, earlier: Prompt | None) -> bool:
    if earlier is None or len(token_ids) <= earlier.num_tokens:
        return False
    equal = common_prefix_length(earlier.token_ids, token_ids)
    return equal >= max(1, earlier.num_tokens - _ANSWER_HEADER)
