"""
One request in the fleet, from the client to the journal, cut by who writes it.

    Incoming           what the client asks for                 frozen, made by the relay
    Routed             which plan and ticket it is sent with    frozen, replaced by the router for another try
    RequestProgress    what was observed of it                  each field has one writer
    Treatment          how the controller lets it be served     see `kvshare.sharing.control`
    Execution          where it ran, and the report of that     outlives the request and holds no tokens

docs/architecture.md names the writer of each field.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delta_tree import Node
from kvshare.fleet.client import RenderedPrompt
from kvshare.namespace import Owner
from kvshare.reasons import Reason
from kvshare.requests import Prompt, SharingMode, SharingReport, StoredPrompt
from kvshare.sharing.arrivals import Arrival
from kvshare.sharing.control import Treatment
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import TICKET_KEY, FinishedReport, Ticket
from kvshare.vllm_protocol.salts import owner_salt, private_salt

_UNPLANNED = NoPlan(Reason.OFF)


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A client's request. Without a prompt it is not planned, only relayed with its owner's salt."""

    owner: Owner
    prompt: Prompt | None = None
    mode: SharingMode = SharingMode.OFF
    max_deviation: float | None = None  # nats; counts where it is below that of the settings
    may_store: bool = False
    is_controlled: bool = True  # false: it asks to be stored, and the controller leaves it alone
    unique_id: str = ""  # in the access log and `GET /admin/requests`
    rendered: RenderedPrompt | None = None  # the prompt as vLLM wrote it, if that may be given back to it


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The router's decision: the plan, and the ticket by which the connector knows and reports it."""

    plan: Plan | NoPlan = _UNPLANNED
    ticket: Ticket | None = None
    arrival: Arrival | None = None  # similar prompts wait for this one
    lookup: Lookup | None = None  # whose use is noted once it is sent


@dataclass(slots=True, eq=False)
class RequestProgress:
    """The observations of a request while it runs."""

    # By the router, when it is planned.
    lookup_seconds: Mapping[str, float] = field(default_factory=dict)  # by stage
    queue_s: float | None = None  # what its replica had to compute before it

    # By the replica, when this or another request is sent there.
    was_alone: bool = False  # it prefilled no other request meanwhile
    sent_at: float = 0.0

    # By the relay.
    has_failed: bool = False  # it did not reach vLLM, or vLLM answered with an error
    num_output: int = 0  # tokens of the answer, about
    is_complete: bool = False  # the answer reached its end
    prefill_s: float | None = None  # from sending to the first token of a streamed answer
    is_prefilled: bool = False  # as far as a stream or the journal has shown

    # By the keeper, from the journal.
    prompt_node: Node | None = None  # set when the prompt is prefilled and stored
    prompt_not_stored: bool = False  # then its answer is not stored either

    # By `InFlight`.
    ended_at: float | None = None  # None while the answer runs
    is_reported: bool = False  # the journal reported it; tree and index may not have it yet
    reconciled: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is forgotten


@dataclass(slots=True, eq=False)
class Execution:
    """The replica where a request ran, and its report."""

    replica: str = ""  # name of the last replica it was sent to
    finished: FinishedReport | None = None  # the report in the journal, without tokens and segments
    stored: StoredPrompt = field(default_factory=StoredPrompt)


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request and its state. Only `routed` and `treatment` are ever replaced, by the router."""

    incoming: Incoming
    routed: Routed = field(default_factory=Routed)
    progress: RequestProgress = field(default_factory=RequestProgress)
    execution: Execution = field(default_factory=Execution)
    treatment: Treatment = field(default_factory=Treatment)

    @property
    def replica(self) -> str:
        return self.execution.replica

    @property
    def report(self) -> SharingReport | None:
        """Return how much the plan shares; None without a prompt."""
        prompt = self.incoming.prompt
        return None if prompt is None else Lookup(self.routed.plan).report(prompt.num_tokens)

    @property
    def is_only_compared(self) -> bool:
        ticket = self.routed.ticket
        return ticket is not None and not (ticket.copies or ticket.store)

    @property
    def salt(self) -> str:
        """vLLM's cache_salt: unique for approximate KV, else that of the owner."""
        ticket = self.routed.ticket
        if ticket is None or ticket.is_exact:
            return owner_salt(self.incoming.owner)
        return private_salt(ticket.ticket_id)

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """
        vLLM's `kv_transfer_params`, if there is a ticket.

        An approximate plan adds the number of reused tokens in vLLM's own parameter. Without it vLLM would
        also count the tokens that the connector computed as cached.
        """
        ticket = self.routed.ticket
        if ticket is None:
            return None
        params: dict[str, Any] = {TICKET_KEY: ticket.to_json()}
        if not ticket.is_exact and (report := self.report) is not None:
            params |= {"do_remote_prefill": True, "remote_prefill_cached_tokens": report.num_cached}
        return params

    def rendered_for(self, vllm_url: str) -> bytes | None:
        """
        Return the prompt as a list of token ids in JSON, for vLLM's `kv_transfer_params.prompt_token_ids`.

        vLLM then computes these tokens and does not apply template and tokenizer once more. Only for requests
        with a ticket, and for the vLLM that rendered them: another one may have another template.
        """
        rendered = self.incoming.rendered
        if self.routed.ticket is None or rendered is None or rendered.vllm_url != vllm_url:
            return None
        return rendered.tokens.raw

    def note_prefilled(self) -> None:
        """Its first token arrived, or its prompt is reported: similar ones only wait until it is stored."""
        self.progress.is_prefilled = True
        if self.routed.arrival is not None:
            self.routed.arrival.remaining = lambda: 0
