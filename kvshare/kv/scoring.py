"""
Scores copied tokens by what a probe pass measured, on the device where it was measured.

    score of a copied token = sum over layers of  sqrt(attended) x changed  x  repairable

    attended   attention that the last placeholders pay to it, mean over them and over heads; the square root,
               because later tokens of the answer attend to other places
    changed    how far its values change when it is computed: measured at the probes, interpolated elsewhere
    repairable falls with the distance to the start of its stretch: there a token attends to stale neighbours

What is needed for that and known before the pass is made by numpy, in O(T), and copied to the device once.
After the pass the device does O(L x T), and the host gets two numbers a token. T tokens of the prompt, L
layers, P probes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.to_device import to_device

_LEAST = 1e-6


class Scoring:
    """
    Scores the tokens in `stretches`, which are contiguous copies of one donor each, ascending.

    `probes`: the positions whose change is measured, ascending. `repairable`: (T,) 0 outside of stretches.
    """

    def __init__(
        self,
        stretches: Sequence[Span],
        probes: Sequence[int],
        repairable: NDArray[np.float32],
        *,
        device: torch.device,
    ) -> None:
        places = np.array(probes, np.int64)
        before, distances, gaps = _interpolation(stretches, places, len(repairable))
        self._before, self._distances, self._gaps, self._repairable = to_device(
            device, before, distances, gaps, repairable
        )

    def scores(self, attended: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        """
        (T,) the scores of the tokens in stretches; 0 elsewhere. All on the device.

        Shapes:  attended (L, T) by the listeners, mean over them and over heads; changed (L, P), norms, of
                 the same layers
        """
        logs = (changed + _LEAST).log()
        mean = logs.mean(dim=1, keepdim=True) if logs.shape[1] else logs.new_zeros(len(logs), 1)
        values = torch.cat([logs, mean], dim=1)
        slopes = (values.roll(-1, dims=1) - values) * self._gaps
        change = torch.addcmul(
            values.index_select(1, self._before), slopes.index_select(1, self._before), self._distances
        )
        return attended.sqrt().mul_(change.exp_()).sum(dim=0) * self._repairable


def _interpolation(
    stretches: Sequence[Span], places: NDArray[np.int64], num_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """
    Return how changes are interpolated in the logarithm, within a stretch.

    (T,) the number of the last probe of the stretch that is not after the token, or else of its first one; P
    stands for the mean of all, if the stretch has none. (T,) the distance from that probe, 0 before it.
    (P + 1,) 1 / the distance to the next probe of the stretch; 0 if there is none, so after the last probe
    nothing changes.
    """
    before = np.full(num_tokens, len(places), np.int32)
    distances = np.zeros(num_tokens, np.float32)
    gaps = np.zeros(len(places) + 1, np.float32)
    for stretch in stretches:
        first, end = places.searchsorted([stretch.start, stretch.end])
        if first == end:
            continue
        inside = np.arange(stretch.start, stretch.end)
        last = np.maximum(first, places.searchsorted(inside, side="right") - 1)
        before[inside] = last
        distances[inside] = np.maximum(0, inside - places[last])
        gaps[first : end - 1] = 1 / np.diff(places[first:end])
    return before, distances, gaps
