"""
Which layers of a load have arrived in vLLM's blocks, for a pass that begins before all of them have.

    WRITE    [batch 0: layers 0-2][batch 1: 0-2][batch 2: 3-5][batch 3: 3-5] ..
    VLLM            [ the pass:    layer 0 ][ 1 ][ 2 ]   [ 3 ][ 4 ] ..
                                   ^ after batch 1        ^ after batch 3

The device waits, the host does not. Separate events measure how long the device waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from kvshare.vllm_connector.worker.gpu import Event, Gpu, Stream

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.staged_layers import StagedLayers


class LayerArrivals:
    """The thread that copies calls `plan` and `note`; vLLM's thread calls everything else."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._until = [0]  # bytes of the batches before each batch; last, of all batches
        self._last: list[int] = []  # by layer, the number of the last batch that has a part of it
        self._ends: list[Event] = []  # of the batches that are launched
        self._num_past = 0
        self._num_awaited = 0  # batches for which vLLM's stream has waited, or will wait
        self._waits: list[tuple[Event, Event]] = []

    def plan(self, batches: Sequence[Sequence[StagedLayers]]) -> None:
        """Set the batches of a load, in the order of their launches."""
        num_layers = batches[0][0].stored.num_layers
        last = [0] * num_layers
        for number, batch in enumerate(batches):
            for part in batch:
                for layer in part.layers:
                    last[layer] = number
        self._until = [0, *accumulate(sum(part.num_bytes for part in batch) for batch in batches)]
        self._last = last

    def note(self, end: Event) -> None:
        """Note that the next batch is launched, and ends with this event."""
        self._ends.append(end)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all layers; 0 before they are known."""
        return self._until[-1]

    @property
    def is_cut(self) -> bool:
        """Return whether there are several batches, and all of them are launched."""
        return 1 < len(self._ends) == len(self._until) - 1

    @property
    def end(self) -> Event:
        """Return the event of the last batch."""
        return self._ends[-1]

    def pending_bytes(self) -> list[int]:
        """Return for each layer how many bytes have yet to arrive until all of it has."""
        while self._num_past < len(self._ends) and self._gpu.is_past(self._ends[self._num_past]):
            self._num_past += 1
        there = self._until[self._num_past]
        return [max(0, self._until[number + 1] - there) for number in self._last]

    def wait_for(self, layer: int) -> None:
        """Let vLLM's stream wait until this layer has arrived."""
        number = self._last[layer]
        if number < self._num_awaited:
            return
        self._num_awaited = number + 1
        end = self._ends[number]
        if not self._gpu.is_past(end):
            before = self._gpu.record(Stream.VLLM)
            self._gpu.wait(Stream.VLLM, end)
            self._waits.append((before, self._gpu.record(Stream.VLLM)))

    @property
    def num_waits(self) -> int:
        """Return how often vLLM's stream has waited, or will wait."""
        return len(self._waits)

    def waited_s(self, waits: slice = slice(None)) -> float | None:
        """Return the seconds that vLLM's stream waited in all of these; None while it is still waiting."""
        found = [self._gpu.seconds(before, after) for before, after in self._waits[waits]]
        return None if None in found else sum(seconds for seconds in found if seconds is not None)
