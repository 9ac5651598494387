"""A prompt's prefill, pass by pass: what is not reused is computed, and repairs are chosen on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span, TokenIds, merge
from kvshare.kv.attention import take_pass
from kvshare.kv.listening import Listener
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.plan import NoPlan, Plan, RepairOrder
from kvshare.sharing.selection import Choice, choose

if TYPE_CHECKING:
    from kvshare.engines.embedded.model import EmbeddedModel


class Prefill:
    """
    Computes a prompt whose copies are laid out in `kv`.

    `plan` is the plan as it is carried out: its repairs are known once the probe pass is over.
    """

    def __init__(self, model: EmbeddedModel, prompt: TokenIds, plan: Plan | NoPlan, kv: SequenceKV) -> None:
        self.plan = plan
        self._model = model
        self._prompt = prompt
        self._kv = kv
        self._probe: _ProbePass | None = None
        self._remaining: tuple[Span, ...] = (Span(0, len(prompt)),)
        if isinstance(plan, Plan):
            self._remaining = plan.probe_pass
            if plan.order is not None:
                self._probe = _ProbePass(kv, plan, plan.order)

    def advance(self, *, max_queries: int) -> tuple[int, torch.Tensor | None]:
        """
        One pass. Returns how many tokens it computed, and behind the last one the logits (V,) of the answer.
        """
        listener = self._probe.listener if self._probe is not None else None
        current, self._remaining = take_pass(
            self._kv, self._remaining, max_queries=max_queries, listener=listener
        )
        tokens = np.concatenate([self._prompt[run.start : run.end] for run in current.runs])
        logits = self._model.compute(current, tokens)
        if self._remaining:
            return current.num_queries, None
        if self._probe is None:
            return current.num_queries, logits
        self._repair(self._probe)
        return current.num_queries, None

    def _repair(self, probe: _ProbePass) -> None:
        """Behind the probe pass: the repairs, and the listeners and what they attend to most, once more."""
        choice = probe.choice()
        self.plan = probe.plan.with_repairs(choice.repairs)
        self._remaining = merge([*choice.repairs, *choice.again])
        self._probe = None


class _ProbePass:
    """What is measured in a plan's first passes, and the choice behind them."""

    def __init__(self, kv: SequenceKV, plan: Plan, order: RepairOrder) -> None:
        self.plan = plan
        self._order = order
        self._kv = kv
        self._places = torch.tensor(order.probes, dtype=torch.int64, device=kv.layout.device)
        self._laid_k, self._laid_v = kv.k[:, self._places], kv.v[:, self._places]  # copies
        self.listener = Listener(
            plan.listeners,
            num_layers=kv.layout.num_layers,
            num_slots=plan.num_tokens,
            device=kv.layout.device,
        )

    def choice(self) -> Choice:
        """The probes stand as they were laid again, since they count as no repair."""
        changed = self._changed()
        self._kv.k[:, self._places], self._kv.v[:, self._places] = self._laid_k, self._laid_v
        return choose(
            self._order,
            self.plan.placeholders,
            self.listener.attended,
            changed,
            first_approximate=self.plan.first_approximate,
        )

    def _changed(self) -> NDArray[np.float32]:
        """(L, P) how far the values of the probes moved."""
        difference = self._kv.v[:, self._places].float() - self._laid_v.float()
        moved: NDArray[np.float32] = difference.flatten(2).norm(dim=2).cpu().numpy()
        return moved
