"""
Scores copied tokens by what a probe pass measured, on the device where it was measured.

    score of a copied token = sum over layers of  sqrt(attended) x changed  x  repairable

    attended   attention that the last placeholders pay to the token, mean over these placeholders and over
               heads; its square root counts, because later tokens of the answer attend to other tokens
    changed    how far the token's values change when it is computed: measured at the probes, interpolated at
               other tokens
    repairable falls with the distance to the start of the stretch: far from the start, the neighbours that a
               token attends to are stale

Before the pass, numpy computes everything that does not depend on the pass, in O(T). These arrays are copied
to the device once. After the pass the device does O(L x T) work, and the host gets two numbers for each
token. T is the number of tokens of the prompt, L the number of layers, P the number of probes.
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
    Scores the tokens in `stretches`. Each stretch is contiguous copies of one donor; stretches are ascending.

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
        Return the scores (T,) of the tokens in stretches; 0 elsewhere. All tensors are on the device.

        Shapes:  attended (L, T), the attention of the listeners, mean over listeners and over heads; changed
                 (L, P), norms of the changes in the same layers
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
    Return three arrays that say how the logarithms of changes are interpolated within a stretch.

    1. (T,) For each token, the index of a probe in the same stretch: the last probe that is not after the
       token; if all are after it, the first one. P, for the mean of all probes, if the stretch has no probe.
    2. (T,) The distance from that probe to the token; 0 if the token is before the probe.
    3. (P + 1,) For each probe, 1 / the distance to the next probe of the stretch. 0 if there is no next
       probe, so the interpolated value stays constant after the last probe.
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
