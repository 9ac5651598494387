"""Tickets that are out: what the proxy must still know of a request when the news of its end comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from delta_tree import TokenIds
from kvshare.namespace import Owner
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import Ticket
from vector_index import PromptText


@dataclass(slots=True, eq=False)
class Pending:
    """One ticket, the prompt it belongs to, and what was seen of the answer."""

    ticket: Ticket
    replica: str
    owner: Owner
    prompt: TokenIds
    text: PromptText
    plan: Plan | NoPlan
    was_alone: bool  # no other request ran at the replica when it was sent
    sent_at: float = field(default_factory=time.perf_counter)
    first_byte_s: float | None = None  # of a streamed answer
    ended_at: float | None = None  # None while the answer runs
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)


class PendingTickets:
    """By request id. Whoever ends without news expires: the request never reached the scheduler."""

    def __init__(self, *, expiry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry_s = expiry_s
        self._clock = clock
        self._by_id: dict[str, Pending] = {}
        self._settling: set[Pending] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, pending: Pending) -> None:
        self._by_id[pending.ticket.request_id] = pending

    def end(self, pending: Pending, *, was_refused: bool) -> None:
        """The answer is over. A refused request will not be heard of."""
        if was_refused:
            self._remove(pending)
        elif pending.ended_at is None:
            pending.ended_at = self._clock()

    def take(self, request_id: str, replica: str) -> Pending | None:
        """
        The ticket that a replica tells the end of; None where it is not out, or not there.

        Until the caller calls `settle`, whoever waits for its owner waits on.
        """
        pending = self._by_id.get(request_id)
        if pending is None or pending.replica != replica:
            return None
        del self._by_id[request_id]
        self._settling.add(pending)
        return pending

    def settle(self, pending: Pending) -> None:
        """What was told of a ticket can be found by others now."""
        self._settling.discard(pending)
        pending.is_settled.set()

    def forget_replica(self, replica: str) -> None:
        """Nothing will be heard from this replica about these."""
        for pending in [entry for entry in self._by_id.values() if entry.replica == replica]:
            self._remove(pending)

    def expire(self) -> int:
        """Forget whom nobody will be heard of. Returns how many."""
        late = self._ended(lambda age_s: age_s >= self._expiry_s)
        for pending in late:
            self._remove(pending)
        return len(late)

    async def caught_up(self, owner: Owner, *, timeout_s: float) -> None:
        """Wait for the news of an owner's answers that ended just now, until `timeout_s` after their end."""
        fresh = self._ended(lambda age_s: age_s < timeout_s)
        over = [
            asyncio.ensure_future(entry.is_settled.wait())
            for entry in (*fresh, *self._settling)
            if entry.owner == owner
        ]
        if not over:
            return
        try:
            await asyncio.wait(over, timeout=timeout_s)
        finally:
            for waiter in over:
                waiter.cancel()

    def _ended(self, is_wanted: Callable[[float], bool]) -> list[Pending]:
        """Those whose answer is over, by the seconds since."""
        now = self._clock()
        return [
            entry
            for entry in self._by_id.values()
            if entry.ended_at is not None and is_wanted(now - entry.ended_at)
        ]

    def _remove(self, pending: Pending) -> None:
        self._by_id.pop(pending.ticket.request_id, None)
        pending.is_settled.set()
