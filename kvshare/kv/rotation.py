"""
Moving keys to other positions. Values carry no position and stay as they are.

K is stored rotated for the position p it was computed at. Rotations compose, so a key for p + d is the
stored one rotated by d, with the model's own frequencies (RoFormer, arXiv:2104.09864, eq. 34; CacheBlend
appendix A). A magnitude factor on cos and sin (YaRN) is already in the stored key and is not applied twice.
"""

from __future__ import annotations

import torch

from delta_tree import Span
from kvshare.kv.segment import SegmentKV


class Rotation:
    """
    Rotary geometry of a model: half-split layout over the whole head, one frequency table.

    Shapes:  inverse_frequencies (D / 2,), kept in float32
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        self.inverse_frequencies = inverse_frequencies.detach().to(torch.float32)

    @property
    def head_dim(self) -> int:
        return 2 * len(self.inverse_frequencies)

    def moved(self, k: torch.Tensor, shift: int) -> torch.Tensor:
        """
        Keys `shift` positions further, computed in float32.

        Shapes:  k (..., D) -> the same, same dtype, new memory
        Units:   shift in tokens, may be negative
        """
        angles = shift * self.inverse_frequencies.to(device=k.device, dtype=torch.float64)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = k.float().chunk(2, dim=-1)
        moved = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return moved.to(k.dtype)


def moved_rows(
    segment: SegmentKV, source: Span, shift: int, rotation: Rotation | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    K and V of a part of a segment, keys rotated by `shift` positions.

    Shapes:  segment.k, segment.v (L, T_segment, H, D) -> k, v (L, len(source), H, D) on `device`
    Raises:  ValueError if it moves and the model's rotation is not known
    """
    tokens = slice(source.start, source.end)
    k, v = (rows[:, tokens].to(device, non_blocking=True) for rows in (segment.k, segment.v))
    if shift == 0:
        return k, v
    if rotation is None:
        raise ValueError(f"a copy moves by {shift} tokens, but this model's rotation is not known")
    return rotation.moved(k, shift), v
