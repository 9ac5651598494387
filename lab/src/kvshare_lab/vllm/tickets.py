"""Requests with tickets made here, straight to the vLLM that has the connector: no proxy decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from delta_tree import Span, TokenIds
from kvshare.errors import EngineError
from kvshare.vllm_protocol.messages import (
    TICKET_KEY,
    FinishedReport,
    Ticket,
    WireCopy,
    digest_of,
)
from kvshare.vllm_protocol.salts import private_salt
from kvshare_lab.vllm.client import Answer, Client
from kvshare_lab.vllm.session import Watch

_MAX_POLLS = 600
_POLL_S = 0.05


@dataclass(slots=True)
class TicketWriter:
    """Makes and sends what a proxy would send; requests are numbered. `name`: the namespace."""

    shared: Client
    watch: Watch  # of its connector
    name: str
    _numbers: Iterator[int] = field(default_factory=count)

    async def check(self) -> None:
        """Raises EngineError if the connector shares nothing."""
        info = await self.watch.control.info()
        if not info.shares:
            raise EngineError(f"the connector shares nothing: {'; '.join(info.refusals)}")

    async def store(self, prompt: TokenIds) -> FinishedReport:
        """Have a prompt computed and stored. Its own salt hides it in vLLM's prefix cache."""
        _, finished = await self.ask(prompt, store=True)
        return finished

    async def ask(
        self,
        prompt: TokenIds,
        copies: Sequence[WireCopy] = (),
        *,
        exact_length: int = 0,
        store: bool = False,
        max_tokens: int = 1,
        num_top: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> tuple[Answer, FinishedReport]:
        """
        Send a prompt with a plan, and with a salt that no other request has. Returns the connector's report,
        too. `store`: the connector is to store the prompt. `extra`: further keys of the body.

        Raises:  EngineError if there is no report in time
        """
        ticket = Ticket(
            ticket_id=f"{self.name}-{next(self._numbers)}",
            namespace=self.name,
            prompt_digest=digest_of(prompt),
            num_tokens=len(prompt),
            exact_length=exact_length,
            copies=tuple(copies),
            store=store,
        )
        own = ticket.ticket_id
        body = {
            **(extra or {}),
            "kv_transfer_params": {TICKET_KEY: ticket.to_json()},
            "cache_salt": own if ticket.is_exact else private_salt(own),
        }
        answer = await self.shared.complete(prompt, max_tokens=max_tokens, num_top=num_top, extra=body)
        for _ in range(_MAX_POLLS):
            await self.watch.look()
            for event in self.watch.seen:
                if event.ticket_id == own:
                    return answer, event
            await asyncio.sleep(_POLL_S)
        raise EngineError(f"the connector has not reported request {own} after {_MAX_POLLS * _POLL_S:g} s")


def copies_of(finished: FinishedReport, source: Span, target_start: int) -> Iterator[WireCopy]:
    """A stretch of a stored prompt from the segments that have it, to be written from `target_start` on."""
    for stored in sorted(finished.stored, key=lambda stored: stored.start):
        if part := source.intersection(stored.span):
            offset, target = part.start - stored.start, target_start + part.start - source.start
            yield WireCopy(stored.segment_id, offset, len(part), target, source_position=part.start)
