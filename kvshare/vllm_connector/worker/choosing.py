"""
Choose repairs during a load of KV: a first pass with probes, the choice, and a second pass for the repairs.

    [ copy ][ run ][ copy ][ run ][ copy ][ tail ]
       p       x     p p      x              x         first pass:   x computed, p probes
      r r            r        x              x         second pass:  r repairs, x again

    the device      [ first pass: three quarters of the layers | the rest | probes restored ][ second pass ]
                                                        '-> results
    vLLM's thread   launches it ... other steps ...              the choice, launches the second pass

Results go to the host while the first pass goes on. So the second pass is launched before the first pass has
ended, and a GPU does not wait for the choice.

The tail is computed twice: the first time shows what the tail attends to. vLLM computes the last token of the
tail a third time. A first pass over few tokens is brief: it ends after the layers in which attention is
measured, and the second pass computes all placeholders. So on a GPU a brief first pass may begin while the
last layers of the load are still arriving:

    copies          [ layers 0-2 ][ 3-5 ] ..                    [ 24-26 ][ 27-29 ] ..        [ 33-35 ]
    the device                         [ first pass: layers 0 to 26 ]        [ second pass: all layers ]

If attention cannot be measured, or the tail is long (then the load ends at the last copy), there are no
probes: repairs are chosen by position, and one pass computes everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from delta_tree import SegmentId, Span, merge
from kvshare.kv.listening import Listener
from kvshare.kv.scoring import Scoring
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED, RepairOrder, last_tokens
from kvshare.sharing.repair_choice import (
    RepairChoice,
    choose,
    choose_by_place,
    num_listening_layers,
    repairable,
)
from kvshare.vllm_connector.metadata import LoadRequest
from kvshare.vllm_connector.worker.device import Device, Reading
from kvshare.vllm_connector.worker.kept_rows import KeptRows
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.ranks import num_ranks, summed
from kvshare.vllm_connector.worker.runs import Run, runs_of

# If a load has no more placeholders than this, the second pass computes all of them, brief or not.
_FEW = MAX_LISTENERS + MAX_RENEWED


class Choosing:
    """
    Carries out the repair order of one load of KV. `choice`: None until the choice is made.

    `can_listen`: whether attention can be measured. `may_stop`: whether passes may end after some layers.
    `is_brief`: the first pass may end after some layers, and the second pass computes all placeholders.
    """

    def __init__(
        self,
        load: LoadRequest,
        order: RepairOrder,
        unreadable: frozenset[SegmentId],
        *,
        can_listen: bool,
        may_stop: bool = False,
    ) -> None:
        self._load = load
        self._computed = load.runs(unreadable)
        self._head_rows = load.head_rows(unreadable)
        listens = can_listen and bool(self._computed) and load.end == len(load.token_ids)
        probes = order.probes if listens else ()
        probes = tuple(p for p in probes if not any(s.start <= p < s.end for s in self._computed))
        self._order = RepairOrder(order.stretches, probes, order.num_tokens)
        self.choice = None if listens else self._choice_by_place()
        self.is_brief = listens and may_stop and not self._head_rows and self._num_computed <= _FEW
        self._listener: Listener | None = None
        self._scoring: Scoring | None = None
        self._reading: Reading | None = None  # set when all measured layers have run
        self._chosen: RepairChoice | None = None  # the choice, made before the second pass begins
        self._probed: KeptRows | None = None

    @property
    def first_spans(self) -> tuple[Span, ...]:
        """Return the first pass's spans: placeholders, a head's rows, and probes or repairs by place."""
        repairs = () if self.choice is None else self.choice.repairs
        probes = (Span(place, place + 1) for place in self._order.probes)
        head_rows = (Span(place, place + 1) for place in self._head_rows)
        return merge([*self._computed, *probes, *repairs, *head_rows])

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the positions of copies that the first pass computes for the drafting head only."""
        repairs = () if self.choice is None else self.choice.repairs
        probes = (Span(place, place + 1) for place in self._order.probes)
        computed = merge([*probes, *repairs])
        return tuple(p for p in self._head_rows if not any(s.start <= p < s.end for s in computed))

    @property
    def listens(self) -> bool:
        """Return whether repairs are still to be chosen by what the first pass measures."""
        return self.choice is None

    @property
    def max_second(self) -> int:
        """Return the most tokens that a second pass may compute; 0 once the choice is made."""
        if self.choice is not None:
            return 0
        renewed = self._num_computed if self.is_brief else MAX_LISTENERS + MAX_RENEWED
        return self._order.num_tokens + renewed

    @property
    def _num_computed(self) -> int:
        """Return the number of placeholders."""
        return sum(map(len, self._computed))

    def layers_of_first(self, num_layers: int) -> int | None:
        """Return how many layers the first pass needs; None: all layers."""
        return num_listening_layers(num_layers) if self.is_brief else None

    def first_pass(self, cache: PagedCache, device: Device, *, is_early: bool = False) -> list[Run]:
        """
        Begin to listen, unless the choice is made, and keep the probes' rows to restore them later.

        `is_early`: not all copies have arrived yet, so the caller calls `keep` for each layer that arrives.
        """
        layout = cache.kv_layout
        num_layers = self.layers_of_first(layout.num_layers)
        if self.choice is None:
            self._listener = Listener(
                last_tokens(self._computed, MAX_LISTENERS),
                num_layers=num_listening_layers(layout.num_layers),
                num_slots=self._load.end,
                device=layout.device,
                when_complete=partial(self._read, device),
            )
            stretches, probes = self._order.stretches, self._order.probes
            weights = repairable(stretches, self._load.end)
            self._scoring = Scoring(stretches, probes, weights, device=layout.device)
            if probes:
                # A pass that is not early may serve other loads, too, and then computes all layers.
                kept = num_layers if is_early else None
                self._probed = KeptRows(cache, self._load.block_ids, probes, num_layers=kept)
                if not is_early:
                    self._probed.keep_all()
        return runs_of(
            self._load, self.first_spans, kept=self.kept, listener=self._listener, num_layers=num_layers
        )

    def keep(self, layer: int) -> None:
        """Keep the probes' rows of a layer that has arrived, before the early first pass overwrites them."""
        if self._probed is not None:
            self._probed.keep(layer)

    def _read(self, device: Device) -> None:
        """Send the measurements to the host while the first pass runs: on all ranks at the same layer."""
        assert self._listener is not None
        assert self._scoring is not None
        attended = self._listener.attended / num_ranks()
        squares = attended.new_zeros(len(attended), 0)  # of the changes at the probes
        if self._probed is not None:
            squares = self._probed.squared_changes(len(attended))
        if num_ranks() > 1:
            total = summed(torch.cat([attended, squares], dim=1))
            attended, squares = total[:, : self._load.end], total[:, self._load.end :]
        scores = self._scoring.scores(attended, squares.sqrt())
        self._reading = device.read(torch.stack((scores, attended.sum(dim=0))))

    def end_first_pass(self) -> Reading:
        """Restore the rows of the probes and return the measurements. A second call restores nothing."""
        assert self._reading is not None, "all listeners are in the pass"
        if self._probed is not None:
            self._probed.restore()
        self._listener = self._scoring = self._probed = None
        return self._reading

    def second_pass(self, reading: Reading) -> list[Run]:
        """
        Choose repairs by the measurements; all ranks choose the same repairs. Returns the runs of repairs and
        of placeholders to renew. There are none if the first pass is enough: it was not brief, nothing was
        probed, and nothing is repaired.
        """
        self.choice = self._choose(reading)
        return runs_of(self._load, self._second_spans(self.choice))

    def early_second(self) -> Sequence[Span] | None:
        """
        Return the spans of the second pass if it may begin before the load has arrived; else None.

        It may begin if the first pass was brief and its results are on the host. This method only returns the
        spans; `second_pass` makes the runs.
        """
        if not self.is_brief or self._reading is None or not self._reading.is_done:
            return None
        return self._second_spans(self._choose(self._reading))

    def _choose(self, reading: Reading) -> RepairChoice:
        if self._chosen is None:
            ((scores, attended),) = reading.arrays()
            self._chosen = choose(
                self._order,
                self._computed,
                scores,
                attended,
                first_approximate=self._load.first_approximate,
            )
        return self._chosen

    def _second_spans(self, choice: RepairChoice) -> Sequence[Span]:
        if self.is_brief:
            return merge([*choice.repairs, *self._computed])
        if not choice.repairs and not self._order.probes:
            return ()
        return merge([*choice.repairs, *choice.renewed])

    def _choice_by_place(self) -> RepairChoice:
        return choose_by_place(
            self._order,
            self._computed,
            num_tokens=self._load.end,
            first_approximate=self._load.first_approximate,
        )
