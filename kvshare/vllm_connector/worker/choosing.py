"""
Choosing repairs during a load: a first pass with probes, the choice, and a second pass for the repairs.

    [ copy ][ run ][ copy ][ run ][ copy ][ tail ]
       p       x     p p      x              x         first pass:   x computed, p probes
      r r            r        x              x         second pass:  r repairs, x again

The tail is computed twice, the first time to see what it attends to; vLLM computes its last token a third
time. Where attention cannot be watched, or the tail is long (then the load ends at the last copy), there are
no probes, and repairs are chosen by position.
"""

from __future__ import annotations

import numpy as np

from delta_tree import SegmentId, Span, merge
from kvshare.kv.listening import Listener
from kvshare.kv.to_device import to_device
from kvshare.sharing.plan import MAX_LISTENERS, RepairOrder, last_tokens
from kvshare.sharing.selection import RepairChoice, choose, choose_by_place
from kvshare.vllm_connector.metadata import LoadRequest
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import Run
from kvshare.vllm_connector.worker.ranks import num_ranks, summed


class Choosing:
    """The repair order of one load, whose copies are written."""

    def __init__(
        self,
        load: LoadRequest,
        order: RepairOrder,
        unreadable: frozenset[SegmentId],
        cache: PagedCache,
        *,
        can_listen: bool,
    ) -> None:
        self._load, self._cache = load, cache
        self.listens = can_listen and load.end == len(load.token_ids)
        self._computed = load.runs(unreadable)
        probes = order.probes if self.listens else ()
        probes = tuple(p for p in probes if not any(s.start <= p < s.end for s in self._computed))
        self._order = RepairOrder(order.stretches, probes, order.num_tokens)
        self._probed_rows = cache.rows(load.block_ids, probes) if probes else None
        self.listener = Listener(
            last_tokens(self._computed, MAX_LISTENERS),
            num_layers=cache.kv_layout.num_layers,
            num_slots=load.end,
            device=cache.kv_layout.device,
        )

    @property
    def first_pass(self) -> list[Run]:
        """The runs before the choice: placeholders and probes."""
        probes = (Span(place, place + 1) for place in self._order.probes)
        listener = self.listener if self.listens else None
        return [self._run(span, listener) for span in merge([*self._computed, *probes])]

    def second_pass(self, choice: RepairChoice) -> list[Run]:
        """The runs after the choice: repairs, and what attends to them."""
        return [self._run(span) for span in merge([*choice.repairs, *choice.renewed])]

    def choice(self) -> RepairChoice:
        """The same on every rank. Probed rows are restored, so that probes do not become repairs."""
        if not self.listens:
            return choose_by_place(
                self._order,
                self._computed,
                num_tokens=self._load.end,
                first_approximate=self._load.first_approximate,
            )
        changed = np.empty((self._cache.kv_layout.num_layers, 0))
        if self._probed_rows is not None:
            _, fresh = self._cache.rows(self._load.block_ids, self._order.probes)
            squares = (fresh.float() - self._probed_rows[1].float()).flatten(2).square().sum(dim=2)
            changed = summed(squares).sqrt().cpu().numpy()
            whole = self._cache.slot_numbers(self._load.block_ids, Span(0, self._load.end))
            (slots,) = to_device(self._cache.kv_layout.device, whole[list(self._order.probes)])
            self._cache.write(*self._probed_rows, slots)
        received = summed(self.listener.attended_there) / num_ranks()
        return choose(
            self._order,
            self._computed,
            received.cpu().numpy(),
            changed,
            first_approximate=self._load.first_approximate,
        )

    def _run(self, span: Span, listener: Listener | None = None) -> Run:
        return Run(self._load.block_ids, span, self._load.token_ids, listener=listener)
