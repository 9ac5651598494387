"""The prefill of a prompt, pass by pass: computes what is not reused, and chooses repairs on the way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from delta_tree import Span, TokenIds, merge
from kvshare.kv.attention import PartialPass, take_pass
from kvshare.kv.listening import Listener
from kvshare.kv.scoring import Scoring
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.plan import NoPlan, Plan, RepairOrder
from kvshare.sharing.repair_choice import RepairChoice, choose, num_listening_layers, repairable

Compute = Callable[[PartialPass, TokenIds], torch.Tensor]
"""Computes the KV of a pass's positions in place. Returns the logits after its last one, (V,) float32."""


class Prefill:
    """
    Computes a prompt whose copies have been written into `kv`, with the `compute` of its model.

    `plan` is the plan as it is carried out: repairs are added to it after the probe passes.
    """

    def __init__(
        self,
        compute: Compute,
        prompt: TokenIds,
        plan: Plan | NoPlan,
        kv: SequenceKV,
        *,
        num_computed: int = 0,
    ) -> None:
        """`num_computed`: so many leading tokens were computed before."""
        self.plan = plan
        self._compute = compute
        self._prompt = prompt
        self._kv = kv
        self._probe: _ProbePass | None = None
        self._remaining: tuple[Span, ...] = (Span(0, len(prompt)),)
        if isinstance(plan, Plan):
            self._remaining = plan.probe_pass
            if plan.order is not None:
                self._probe = _ProbePass(kv, plan, plan.order)
        rest = Span(num_computed, len(prompt))
        self._remaining = tuple(part for span in self._remaining if (part := span.intersection(rest)))

    def advance(self, *, max_queries: int) -> tuple[int, torch.Tensor | None]:
        """
        Run one pass. Returns how many tokens it computed and, after the last pass, the answer's logits (V,).
        """
        listener = self._probe.listener if self._probe is not None else None
        current, self._remaining = take_pass(
            self._kv, self._remaining, max_queries=max_queries, listener=listener
        )
        tokens = np.concatenate([self._prompt[run.start : run.end] for run in current.runs])
        logits = self._compute(current, tokens)
        if self._remaining:
            return current.num_queries, None
        if self._probe is None:
            return current.num_queries, logits
        self._repair(self._probe)
        return current.num_queries, None

    def _repair(self, probe: _ProbePass) -> None:
        """Plan the last passes, after the probe passes: repairs, and renewed placeholders."""
        choice = probe.choice()
        self.plan = probe.plan.with_repairs(choice.repairs)
        self._remaining = merge([*choice.repairs, *choice.renewed])
        self._probe = None


class _ProbePass:
    """The measurements of a plan's first passes, and the choice of repairs that follows."""

    def __init__(self, kv: SequenceKV, plan: Plan, order: RepairOrder) -> None:
        self.plan = plan
        self._order = order
        self._kv = kv
        self._places = torch.tensor(order.probes, dtype=torch.int64, device=kv.layout.device)
        self._scoring = Scoring(
            order.stretches,
            order.probes,
            repairable(order.stretches, plan.num_tokens),
            device=kv.layout.device,
        )
        self._copied_k, self._copied_v = kv.k[:, self._places], kv.v[:, self._places]  # copies, not views
        self.listener = Listener(
            plan.listeners,
            num_layers=num_listening_layers(kv.layout.num_layers),
            num_slots=plan.num_tokens,
            device=kv.layout.device,
        )

    def choice(self) -> RepairChoice:
        """Choose the repairs, and restore the copied KV of the probes, as a probe is not a repair."""
        attended = self.listener.attended
        scores = self._scoring.scores(attended, self._changed())
        self._kv.k[:, self._places], self._kv.v[:, self._places] = self._copied_k, self._copied_v
        return choose(
            self._order,
            self.plan.placeholders,
            scores.cpu().numpy(),
            attended.sum(dim=0).cpu().numpy(),
            first_approximate=self.plan.first_approximate,
        )

    def _changed(self) -> torch.Tensor:
        """(L, P) of the first layers: how far the probes' computed values are from the copied ones."""
        first = slice(num_listening_layers(self._kv.layout.num_layers))
        difference = self._kv.v[first, self._places].float() - self._copied_v[first].float()
        changed: torch.Tensor = difference.flatten(2).norm(dim=2)
        return changed
