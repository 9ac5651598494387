"""What goes into and comes out of planning a relayed request; no behaviour."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from kvshare.fleet.pending import Pending
from kvshare.fleet.replica import NAMESPACE_FIELDS, Replica
from kvshare.namespace import Namespace, Owner
from kvshare.requests import Prompt, SharingMode, SharingReport
from kvshare.vllm_protocol.messages import Ticket
from kvshare.vllm_protocol.salts import owner_salt


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A request as far as it can be shared. Without a prompt it is only sent on, under its owner's salt."""

    owner: Owner
    prompt: Prompt | None = None
    mode: SharingMode = SharingMode.OFF
    keep: bool = False
    client_salt: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """Where a request goes, and what is sent along."""

    replica: Replica
    salt: str
    ticket: Ticket | None = None
    pending: Pending | None = None  # what to remember of the ticket until its end is told
    report: SharingReport | None = None  # what is planned; None for a request that was not looked up

    def elsewhere(self, other: Replica, order: Order) -> Dispatch:
        """The same request at another replica, where the plan's KV is not."""
        report = self.report
        if report is not None:
            report = SharingReport(0, 0, report.num_prompt_tokens, 0, "full", "replica_gone")
        return Dispatch(other, owner_salt(order.owner, order.client_salt), report=report)


@dataclass(slots=True, eq=False)
class Flight:
    """A request that is being answered by a replica; the relay notes what it sees."""

    dispatch: Dispatch
    was_refused: bool = False  # it did not get through, or vLLM answered with an error

    def note_first_byte(self, *, streamed: bool) -> None:
        """The first byte of a stream comes with the first token."""
        pending = self.dispatch.pending
        if streamed and pending is not None and pending.first_byte_s is None:
            pending.first_byte_s = time.perf_counter() - pending.sent_at


def namespace_at(replica: Replica, owner: Owner) -> Namespace:
    """An owner's namespace in one replica's memory. The replica's connector has been heard."""
    assert replica.info is not None, "namespaces are for replicas that share"
    parts = {name: replica.info.namespace_fields[name] for name in NAMESPACE_FIELDS}
    return replace(Namespace(tenant=owner.tenant, scope=owner.scope, **parts), holder=replica.name)
