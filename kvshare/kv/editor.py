"""
The KV editor: lays reused KV out for the recipient and leaves a placeholder slot wherever tokens differ.

Source: KVShare, arXiv:2503.16525, section 4.2; keys are always moved from the original segment, never from a
copy that was rotated before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from delta_tree import Copy, SegmentId, Span
from kvshare.kv.rotation import Rotation
from kvshare.kv.segment import SegmentKV
from kvshare.kv.sequence import SequenceKV


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


def lay_out(
    kv: SequenceKV,
    copies: Sequence[Copy],
    segments: Mapping[SegmentId, SegmentKV],
    rotation: Rotation | None,
) -> int:
    """
    Write every copy into its target slots; all other slots stay open.

    Shapes:  segments' k and v (L, T_segment, H, D) -> kv.k, kv.v (L, capacity, H, D)
    Returns: bytes written
    Raises:  ValueError if a copy moves and the model's rotation is not known
    """
    for copy in copies:
        source = Span(copy.offset, copy.offset + copy.length)
        k, v = moved_rows(segments[copy.segment_id], source, copy.shift, rotation, kv.k.device)
        target = slice(copy.target_start, copy.target_start + copy.length)
        kv.k[:, target], kv.v[:, target] = k, v
    return sum(copy.length for copy in copies) * kv.geometry.bytes_per_token
