"""What the proxy sends with a request in a simulation: its plan, and the ticket that carries it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvshare.fleet.routed_request import Routed
from kvshare.fleet.tickets import ticket_for
from kvshare.requests import Prompt
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare_lab.device.admission import Controlled


@dataclass(frozen=True, slots=True)
class Routing:
    """Unless it `chooses`, as many tokens are repaired by place as a choice computes in all."""

    sharing: Sharing
    admission: Controlled
    namespace: str
    chooses: bool

    def routed(self, prompt: Prompt, lookup: Lookup, ticket_id: str) -> Routed:
        """Plan and ticket, which asks for a save if the controller lets it."""
        plan, tokens, disk_s = self._repairing(lookup.plan), prompt.token_ids, 0.0
        num_cached = lookup.report(prompt.num_tokens).num_cached
        store = self.admission.may_store(ticket_id, self.namespace, tokens, num_reused=num_cached)
        if isinstance(plan, NoPlan) and not store:
            return Routed(plan)
        if isinstance(plan, Plan):
            disk_s = self.sharing.fetching.patience_s(plan, self.sharing.limits.threshold)
        ticket = ticket_for(
            plan, tokens, ticket_id=ticket_id, namespace=self.namespace, store=store, disk_s=disk_s
        )
        return Routed(plan, ticket)

    def _repairing(self, plan: Plan | NoPlan) -> Plan | NoPlan:
        if self.chooses or isinstance(plan, NoPlan) or plan.order is None:
            return plan
        num_tokens = plan.order.num_tokens + plan.num_selecting
        return replace(plan, order=replace(plan.order, probes=(), num_tokens=num_tokens))
