"""Requests with tickets made here, straight to the vLLM that has the connector: no proxy decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from delta_tree import Span, TokenIds
from kvshare.bench.vllm.client import Answer, Client
from kvshare.bench.vllm.reports import Watch
from kvshare.errors import EngineError
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.messages import Finished, ReplicaInfo, Ticket, WireCopy, WireOrder, digest_of
from kvshare.vllm_protocol.salts import private_salt

_MAX_POLLS = 600
_POLL_S = 0.05


@dataclass(slots=True)
class TicketWriter:
    """Makes and sends what a proxy would send; requests are numbered. `name`: the namespace."""

    shared: Client
    control: ControlClient
    name: str
    _watch: Watch = field(default_factory=Watch)
    _numbers: Iterator[int] = field(default_factory=count)

    async def check(self) -> ReplicaInfo:
        """What the connector reports of itself. Raises EngineError if it shares nothing."""
        info = await self.control.info()
        if not info.shares:
            raise EngineError(f"the connector shares nothing: {'; '.join(info.refusals)}")
        return info

    async def store(self, prompt: TokenIds) -> Finished:
        """Have a prompt computed and stored. Its own salt hides it in vLLM's prefix cache."""
        ticket = self.ticket(prompt, [], keep=True)
        await self.ask(prompt, ticket, max_tokens=1)
        return await self.finished(ticket)

    def ticket(
        self,
        prompt: TokenIds,
        copies: Sequence[WireCopy],
        *,
        exact_length: int = 0,
        order: WireOrder | None = None,
        keep: bool = False,
    ) -> Ticket:
        """A plan for a prompt. `keep`: the connector is to store the prompt."""
        return Ticket(
            request_id=f"{self.name}-{next(self._numbers)}",
            namespace=self.name,
            prompt_digest=digest_of(prompt),
            num_tokens=len(prompt),
            exact_length=exact_length,
            copies=tuple(copies),
            order=order,
            keep=keep,
        )

    async def ask(self, prompt: TokenIds, ticket: Ticket, *, max_tokens: int, num_top: int = 0) -> Answer:
        """Send the prompt with its ticket, and with a salt that no other request has."""
        own = ticket.request_id
        extra = {
            "kv_transfer_params": {"kvshare": ticket.to_json()},
            "cache_salt": own if ticket.is_exact else private_salt(own),
        }
        return await self.shared.complete(prompt, max_tokens=max_tokens, num_top=num_top, extra=extra)

    async def finished(self, ticket: Ticket) -> Finished:
        """The connector's report of a request. Raises EngineError if there is none in time."""
        for _ in range(_MAX_POLLS):
            await self._watch.look(self.control)
            for event in self._watch.seen:
                if event.request_id == ticket.request_id:
                    return event
            await asyncio.sleep(_POLL_S)
        waited = f"after {_MAX_POLLS * _POLL_S:g} s"
        raise EngineError(f"the connector has not reported request {ticket.request_id} {waited}")


def copies_of(finished: Finished, source: Span, target_start: int) -> Iterator[WireCopy]:
    """A stretch of a stored prompt from the segments that have it, to be written from `target_start` on."""
    for stored in sorted(finished.stored, key=lambda stored: stored.start):
        start, end = max(source.start, stored.start), min(source.end, stored.start + stored.length)
        if start < end:
            yield WireCopy(
                stored.segment_id,
                start - stored.start,
                end - start,
                target_start + start - source.start,
                source_position=start,
            )
