"""
Repairs that are chosen while a load is computed: a probe pass, and what is computed behind it.

    [ copy ][ run ][ copy ][ run ][ copy ][ tail ]     0 .. end: provided    end .. : vLLM's own forward
       p       x     p p      x              x         x computed, p probes: the first pass
      r r            r        x                        r repairs, x again:   the second, up to `end`

The tail is computed twice, here to learn what it attends to, and by vLLM behind the repairs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from delta_tree import SegmentId, Span, merge
from kvshare.kv.listening import Listener
from kvshare.sharing.plan import MAX_LISTENERS, RepairOrder, last_tokens
from kvshare.sharing.selection import Choice, choose, choose_by_place
from kvshare.vllm_connector.metadata import LoadRequest
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import Run

Summed = Callable[[torch.Tensor], torch.Tensor]  # over all ranks, each of which has some of the heads


class Choosing:
    """One load's order. Its copies are laid by now."""

    def __init__(
        self, load: LoadRequest, order: RepairOrder, unreadable: frozenset[SegmentId], cache: PagedCache
    ) -> None:
        self._load, self._cache = load, cache
        limit = min(len(load.token_ids), len(load.block_ids) * cache.block_size)
        self._computed = merge([*load.runs(unreadable), Span(load.end, max(load.end, limit))])
        probes = tuple(p for p in order.probes if not any(s.start <= p < s.end for s in self._computed))
        self._order = RepairOrder(order.pieces, probes, order.num_tokens)
        self._laid = cache.rows(load.block_ids, probes) if probes else None
        self.listener = Listener(
            last_tokens(self._computed, MAX_LISTENERS),
            num_layers=cache.geometry.num_layers,
            num_slots=limit,
            device=cache.geometry.device,
        )

    @property
    def probe_pass(self) -> list[Run]:
        """What is computed first."""
        probes = (Span(place, place + 1) for place in self._order.probes)
        return [self._run(span, self.listener) for span in merge([*self._computed, *probes])]

    def repair_pass(self, choice: Choice) -> list[Run]:
        """What is computed behind it; the tail is vLLM's."""
        provided = Span(0, self._load.end)
        parts = (span.intersection(provided) for span in merge([*choice.repairs, *choice.again]))
        return [self._run(part) for part in parts if part]

    def choice(self, summed: Summed, num_ranks: int) -> Choice:
        """The same on every rank. The probes stand as they were laid again: they count as no repair."""
        changed = np.empty((self._cache.geometry.num_layers, 0))
        if self._laid is not None:
            _, fresh = self._cache.rows(self._load.block_ids, self._order.probes)
            squares = (fresh.float() - self._laid[1].float()).flatten(2).square().sum(dim=2)
            changed = summed(squares).sqrt().cpu().numpy()
            slots = [self._cache.slots(self._load.block_ids, Span(p, p + 1)) for p in self._order.probes]
            self._cache.write(*self._laid, torch.cat(slots))
        self.listener.total = summed(self.listener.total) / num_ranks
        return choose(
            self._order,
            self._computed,
            self.listener.heard,
            changed,
            first_approximate=self._load.first_approximate,
        )

    def choice_by_place(self) -> Choice:
        """Where attention cannot be watched: the starts of the pieces, evenly."""
        return choose_by_place(
            self._order,
            self._computed,
            num_tokens=self.listener.total.shape[1],
            first_approximate=self._load.first_approximate,
        )

    def _run(self, span: Span, listener: Listener | None = None) -> Run:
        return Run(self._load.block_ids, span, self._load.token_ids, listener=listener)
