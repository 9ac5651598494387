"""
Choose repairs during a load: a first pass with probes, the choice, and a second pass for the repairs.

    [ copy ][ run ][ copy ][ run ][ copy ][ tail ]
       p       x     p p      x              x         first pass:   x computed, p probes
      r r            r        x              x         second pass:  r repairs, x again

    the device      [ first pass: three quarters of the layers | the rest | probes restored ][ second pass ]
                                                        '-> results
    vLLM's thread   launches it ... other steps ...              the choice, launches the second pass

Results go to the host while the first pass goes on. So the second pass is launched before the first one has
ended, and a GPU does not wait for the choice.

The tail is computed twice, the first time to see what it attends to; vLLM computes its last token a third
time. If attention cannot be watched, or the tail is long (then the load ends at the last copy), there are no
probes: repairs are chosen by position, and one pass computes everything.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from delta_tree import SegmentId, Span, merge
from kvshare.kv.listening import Listener
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED, RepairOrder, last_tokens
from kvshare.sharing.selection import RepairChoice, choose, choose_by_place, num_listening_layers
from kvshare.vllm_connector.metadata import LoadRequest
from kvshare.vllm_connector.worker.device import Device, Reading
from kvshare.vllm_connector.worker.kept_rows import KeptRows
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import Run, runs_of
from kvshare.vllm_connector.worker.ranks import num_ranks, summed


class Choosing:
    """Carries out the repair order of one load. `choice`: None until it is made."""

    def __init__(
        self, load: LoadRequest, order: RepairOrder, unreadable: frozenset[SegmentId], *, can_listen: bool
    ) -> None:
        self._load = load
        self._computed = load.runs(unreadable)
        self._head_rows = load.head_rows(unreadable)
        listens = can_listen and bool(self._computed) and load.end == len(load.token_ids)
        probes = order.probes if listens else ()
        probes = tuple(p for p in probes if not any(s.start <= p < s.end for s in self._computed))
        self._order = RepairOrder(order.stretches, probes, order.num_tokens)
        self.choice = None if listens else self._choice_by_place()
        self._listener: Listener | None = None
        self._reading: Reading | None = None  # when its layers have been listened to
        self._probed: KeptRows | None = None

    @property
    def first_spans(self) -> tuple[Span, ...]:
        """The spans of the first pass: placeholders, a head's rows, and probes or repairs chosen by place."""
        repairs = () if self.choice is None else self.choice.repairs
        probes = (Span(place, place + 1) for place in self._order.probes)
        head_rows = (Span(place, place + 1) for place in self._head_rows)
        return merge([*self._computed, *probes, *repairs, *head_rows])

    @property
    def kept(self) -> tuple[int, ...]:
        """Positions of copies that the first pass computes for the drafting head only."""
        repairs = () if self.choice is None else self.choice.repairs
        probes = (Span(place, place + 1) for place in self._order.probes)
        computed = merge([*probes, *repairs])
        return tuple(p for p in self._head_rows if not any(s.start <= p < s.end for s in computed))

    @property
    def listens(self) -> bool:
        """Whether repairs are still to be chosen by what the first pass measures."""
        return self.choice is None

    @property
    def max_second(self) -> int:
        """The most tokens that a second pass may compute; 0 once the choice is made."""
        return 0 if self.choice is not None else self._order.num_tokens + MAX_LISTENERS + MAX_RENEWED

    def first_pass(self, cache: PagedCache, device: Device, *, is_early: bool = False) -> list[Run]:
        """
        Begin to listen, unless the choice is made, and keep the probes' rows to restore them later.

        `is_early`: the copies have not arrived yet, so the caller calls `keep` for each layer that has.
        """
        if self.choice is None:
            layout = cache.kv_layout
            self._listener = Listener(
                last_tokens(self._computed, MAX_LISTENERS),
                num_layers=num_listening_layers(layout.num_layers),
                num_slots=self._load.end,
                device=layout.device,
                when_complete=partial(self._read, device),
            )
            if self._order.probes:
                self._probed = KeptRows(cache, self._load.block_ids, self._order.probes)
                if not is_early:
                    self._probed.keep_all()
        return runs_of(self._load, self.first_spans, kept=self.kept, listener=self._listener)

    def keep(self, layer: int) -> None:
        """Keep the probes' rows of a layer that has arrived, before the early first pass overwrites them."""
        if self._probed is not None:
            self._probed.keep(layer)

    def _read(self, device: Device) -> None:
        """Send the measurements of the first pass to the host, during the pass. At one layer on all ranks."""
        assert self._listener is not None
        attended = self._listener.attended_there / num_ranks()
        squares = attended.new_zeros(len(attended), 0)  # of the changes at the probes
        if self._probed is not None:
            squares = self._probed.squared_changes(len(attended))
        if num_ranks() > 1:
            total = summed(torch.cat([attended, squares], dim=1))
            attended, squares = total[:, : self._load.end], total[:, self._load.end :]
        self._reading = device.read(attended.contiguous(), squares.contiguous())

    def end_first_pass(self) -> Reading:
        """Restore the probes' rows, which are not repairs. Returns the measurements. May be called again."""
        assert self._reading is not None, "all listeners are in the pass"
        if self._probed is not None:
            self._probed.restore()
        self._listener = self._probed = None
        return self._reading

    def second_pass(self, reading: Reading) -> list[Run]:
        """
        Choose by the measurements, alike on every rank. Returns the runs of repairs and of renewed
        placeholders; none if nothing was probed and nothing is repaired: then the first pass is enough.
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
        return runs_of(self._load, merge([*self.choice.repairs, *self.choice.renewed]))

    def _choice_by_place(self) -> RepairChoice:
        return choose_by_place(
            self._order,
            self._computed,
            num_tokens=self._load.end,
            first_approximate=self._load.first_approximate,
        )
