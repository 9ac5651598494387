"""
Choosing repairs during a load: a first pass with probes, the choice, and a second pass for the repairs.

    [ copy ][ run ][ copy ][ run ][ copy ][ tail ]
       p       x     p p      x              x         first pass:   x computed, p probes
      r r            r        x              x         second pass:  r repairs, x again

    vLLM's thread   first pass, probes restored    other steps        choice, second pass
    the device      ...... first pass ..... results to the host       .. second pass ..

The tail is computed twice, the first time to see what it attends to; vLLM computes its last token a third
time. Where attention cannot be watched, or the tail is long (then the load ends at the last copy), there are
no probes: repairs are chosen by position, and one pass computes all.
"""

from __future__ import annotations

import numpy as np
import torch

from delta_tree import SegmentId, Span, merge
from kvshare.kv.listening import Listener
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED, RepairOrder, last_tokens
from kvshare.sharing.selection import RepairChoice, choose, choose_by_place
from kvshare.vllm_connector.metadata import LoadRequest
from kvshare.vllm_connector.worker.device import Device, Reading
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import Run
from kvshare.vllm_connector.worker.ranks import num_ranks, summed


class Choosing:
    """The repair order of one load, whose copies are written. `choice`: None until it is made."""

    def __init__(
        self, load: LoadRequest, order: RepairOrder, unreadable: frozenset[SegmentId], *, can_listen: bool
    ) -> None:
        self._load = load
        self._computed = load.runs(unreadable)
        listens = can_listen and load.end == len(load.token_ids)
        probes = order.probes if listens else ()
        probes = tuple(p for p in probes if not any(s.start <= p < s.end for s in self._computed))
        self._order = RepairOrder(order.stretches, probes, order.num_tokens)
        self.choice = None if listens else self._choice_by_place()
        self._listener: Listener | None = None
        self._slots: torch.Tensor | None = None  # of the probes
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None  # K and V there

    @property
    def first_spans(self) -> tuple[Span, ...]:
        """What the first pass computes: placeholders, and probes or, without a second one, repairs."""
        repairs = () if self.choice is None else self.choice.repairs
        probes = (Span(place, place + 1) for place in self._order.probes)
        return merge([*self._computed, *probes, *repairs])

    @property
    def max_second(self) -> int:
        """How many tokens the second pass computes at most, while the choice is not made."""
        return 0 if self.choice is not None else self._order.num_tokens + MAX_LISTENERS + MAX_RENEWED

    def first_pass(self, cache: PagedCache) -> list[Run]:
        """Begin to listen, unless the choice is made. Probes are copied, to be restored."""
        if self.choice is None:
            layout = cache.kv_layout
            self._listener = Listener(
                last_tokens(self._computed, MAX_LISTENERS),
                num_layers=layout.num_layers,
                num_slots=self._load.end,
                device=layout.device,
            )
            if self._order.probes:
                self._slots = cache.slots_at(self._load.block_ids, self._order.probes)
                self._copied = cache.rows(self._slots)
        return [self._run(span, self._listener) for span in self.first_spans]

    def read(self, cache: PagedCache, device: Device) -> Reading:
        """After the first pass: restore the probes, as they are no repairs, and read what it found."""
        assert self._listener is not None
        attended = self._listener.attended_there / num_ranks()
        squares = attended.new_zeros(len(attended), 0)  # of the changes at the probes
        if self._slots is not None and self._copied is not None:
            changes = cache.values(self._slots).float() - self._copied[1].float()
            squares = changes.flatten(2).square().sum(dim=2)
            cache.write(*self._copied, self._slots)
        self._listener = self._slots = self._copied = None
        if num_ranks() > 1:
            total = summed(torch.cat([attended, squares], dim=1))
            attended, squares = total[:, : self._load.end], total[:, self._load.end :]
        return device.read(attended.contiguous(), squares.contiguous())

    def second_pass(self, reading: Reading) -> list[Run]:
        """
        Choose, from what was read: the same on every rank. Returns the runs of repairs and of what attends
        to them; none where nothing was probed and nothing is repaired, as then the first pass stands.
        """
        attended, squares = reading.arrays()
        self.choice = choose(
            self._order,
            self._computed,
            attended,
            np.sqrt(squares),
            first_approximate=self._load.first_approximate,
        )
        if not self.choice.repairs and not self._order.probes:
            return []
        return [self._run(span) for span in merge([*self.choice.repairs, *self.choice.renewed])]

    def _choice_by_place(self) -> RepairChoice:
        return choose_by_place(
            self._order,
            self._computed,
            num_tokens=self._load.end,
            first_approximate=self._load.first_approximate,
        )

    def _run(self, span: Span, listener: Listener | None = None) -> Run:
        return Run(self._load.block_ids, span, self._load.token_ids, listener=listener)
