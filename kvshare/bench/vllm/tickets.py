"""Requests with tickets that are written by hand, to the vLLM that holds the connector: no proxy decides."""

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
    """What a proxy would send, each request with its own number. `name`: the namespace."""

    shared: Client
    control: ControlClient
    name: str
    _watch: Watch = field(default_factory=Watch)
    _numbers: Iterator[int] = field(default_factory=count)

    async def check(self) -> ReplicaInfo:
        """What the connector says of itself. Raises EngineError if it shares nothing."""
        info = await self.control.info()
        if not info.shares:
            raise EngineError(f"the connector shares nothing: {'; '.join(info.refusals)}")
        return info

    async def keep(self, prompt: TokenIds) -> Finished:
        """Have a prompt computed and kept, with a salt of its own: vLLM's prefix cache gives it to nobody."""
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
        """A plan for a prompt, with a number of its own."""
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
        """The prompt with its ticket, and with a salt that no other request has."""
        own = ticket.request_id
        extra = {
            "kv_transfer_params": {"kvshare": ticket.to_json()},
            "cache_salt": own if ticket.is_exact else private_salt(own),
        }
        return await self.shared.complete(prompt, max_tokens=max_tokens, num_top=num_top, extra=extra)

    async def finished(self, ticket: Ticket) -> Finished:
        """What the connector reports of it. Raises EngineError if it does not."""
        for _ in range(_MAX_POLLS):
            await self._watch.look(self.control)
            for event in self._watch.finished:
                if event.request_id == ticket.request_id:
                    return event
            await asyncio.sleep(_POLL_S)
        raise EngineError(f"the journal does not tell of request {ticket.request_id}")


def copies_of(kept: Finished, source: Span, target_start: int) -> Iterator[WireCopy]:
    """A stretch of a kept prompt out of the segments it lies in, to be laid from `target_start` on."""
    for stored in sorted(kept.stored, key=lambda stored: stored.start):
        start, end = max(source.start, stored.start), min(source.end, stored.start + stored.length)
        if start < end:
            yield WireCopy(
                stored.segment_id,
                start - stored.start,
                end - start,
                target_start + start - source.start,
                source_position=start,
            )
