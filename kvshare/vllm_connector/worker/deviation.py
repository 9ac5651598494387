"""
How far computed rows are from those of a full prefill: the self-test's measure.

It is computed on the model's device, one layer at a time: next to vLLM's cache there is no room for more, and
where vLLM has a GPU it leaves torch one thread of the CPU.

Alphabet: L layers, T tokens, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

import torch

from kvshare.kv.sequence import SegmentKV

ROUNDING = 1 / 6  # lower limit of an error, as a share of the tolerance
CLEARLY = 4.0  # negative controls must deviate by at least so many times the error
_FAINT = 1e-2  # lower limit of a channel's spread, as a share of the layer's typical one


class Expected:
    """The rows of a full prefill, on the host, and the scale of each channel, which is computed once."""

    def __init__(self, rows: SegmentKV, *, tolerance: float, device: torch.device) -> None:
        """`tolerance`: the deviation that is expected of rounding."""
        self._planes, self._device = rows.planes, device
        self._scales = [[_scale(own.to(device), tolerance) for own in plane] for plane in rows.planes]

    def deviation(self, got: SegmentKV) -> float:
        """
        Return the error of the worst channel of the worst layer: root mean square over tokens, relative to
        the channel's spread. So a few large channels, as in models with biased keys, do not hide errors in
        others. NaN if a number is.

        Shapes:  got (L, T, H, D) of each plane, on any device
        """
        worst = []
        for right, computed, scales in zip(self._planes, got.planes, self._scales, strict=True):
            for own, found, scale in zip(right, computed, scales, strict=True):
                difference = own.to(self._device).float() - found.to(self._device).float()
                worst.append((difference.square().mean(dim=0).sqrt() / scale).max())
        return float(torch.stack(worst).max())


def _scale(right: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the scale of each channel of a layer. Shapes:  right (T, H, D) -> (H, D) float32"""
    rows = right.float()
    # A large channel that hardly varies has rounding errors above its spread: these do not count.
    rounding = 2 * torch.finfo(right.dtype).eps / tolerance * rows.square().mean(dim=0).sqrt()
    spread = torch.maximum(rows.std(dim=0), rounding)
    return torch.maximum(spread, _FAINT * spread.median()).clamp(min=1e-9)
