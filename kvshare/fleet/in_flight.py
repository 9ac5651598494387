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

from delta_tree import NodeId
from kvshare.namespace import Owner
from kvshare.requests import Prompt, SharingMode, SharingReport
from kvshare.sharing.pipeline import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import TICKET_KEY, Ticket
from kvshare.vllm_protocol.salts import owner_salt, private_salt

_UNPLANNED = NoPlan("off")


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

    # Decided by the router.
    replica: str = ""  # name of the one that it was sent to last
    plan: Plan | NoPlan = _UNPLANNED
    ticket: Ticket | None = None

    # Seen while it is in flight.
    was_alone: bool = False  # no other request ran at the replica when it was sent
    was_refused: bool = False  # it did not get through, or vLLM answered with an error
    sent_at: float = 0.0
    first_byte_s: float | None = None  # of a streamed answer
    ended_at: float | None = None  # None while the answer runs
    reconciled: asyncio.Event = field(default_factory=asyncio.Event)  # nothing more will be known of it

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


class InFlight:
    """Requests with a ticket that are not reported yet, by the ticket's id."""

    def __init__(self, *, expiry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry_s = expiry_s
        self._clock = clock
        self._by_id: dict[str, RoutedRequest] = {}
        self._reconciling: set[RoutedRequest] = set()  # reported, and not in tree and index yet

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_unreconciled(self) -> int:
        return len(self._by_id) + len(self._reconciling)

    def add(self, request: RoutedRequest) -> None:
        """A request without a ticket is not reported: nothing is waited for."""
        if request.ticket is not None:
            self._by_id[request.ticket.request_id] = request

    def end(self, request: RoutedRequest) -> None:
        """The answer is over. A refused request will not be reported."""
        if request.was_refused:
            self._remove(request)
        elif request.ended_at is None:
            request.ended_at = self._clock()

    def take(self, request_id: str, replica: str) -> RoutedRequest | None:
        """
        The request that a replica reports; None where there is none, or it was sent elsewhere.

        Its owner's next requests wait until the caller calls `note_reconciled`.
        """
        request = self._by_id.get(request_id)
        if request is None or request.replica != replica:
            return None
        del self._by_id[request_id]
        self._reconciling.add(request)
        return request

    def donors(self) -> frozenset[NodeId]:
        """The prompts whose KV the tickets that are out refer to: they must not be evicted."""
        plans = (request.plan for request in (*self._by_id.values(), *self._reconciling))
        return frozenset(donor for plan in plans if isinstance(plan, Plan) for donor in plan.donors)

    def note_reconciled(self, request: RoutedRequest) -> None:
        """What was reported of a request can be found by others now."""
        self._reconciling.discard(request)
        request.reconciled.set()

    def forget_replica(self, replica: str) -> None:
        """This replica will report none of its requests any more."""
        for request in [entry for entry in self._by_id.values() if entry.replica == replica]:
            self._remove(request)

    def expire(self) -> int:
        """Forget requests that will not be reported any more. Returns how many."""
        late = self._ended(lambda age_s: age_s >= self._expiry_s)
        for request in late:
            self._remove(request)
        return len(late)

    async def wait_reconciled(self, owner: Owner, *, timeout_s: float) -> None:
        """Wait for the reports of an owner's answers that ended just now, at most `timeout_s`."""
        fresh = self._ended(lambda age_s: age_s < timeout_s)
        awaited = [entry for entry in (*fresh, *self._reconciling) if entry.owner == owner]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for entry in awaited:
                    await entry.reconciled.wait()

    def _ended(self, is_wanted: Callable[[float], bool]) -> list[RoutedRequest]:
        """Those whose answer is over, by the seconds since."""
        now = self._clock()
        return [
            entry
            for entry in self._by_id.values()
            if entry.ended_at is not None and is_wanted(now - entry.ended_at)
        ]

    def _remove(self, request: RoutedRequest) -> None:
        if request.ticket is not None:
            self._by_id.pop(request.ticket.request_id, None)
        request.reconciled.set()
