"""
The KV editor: lays reused KV out for the recipient and leaves a placeholder slot wherever tokens differ.

Source: KVShare, arXiv:2503.16525, section 4.2; keys are always moved from the original segment, never from a
copy that was rotated before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from delta_tree import Copy, SegmentId
from kvshare.kv.rotation import Rotation
from kvshare.kv.segment import SegmentKV
from kvshare.kv.sequence import SequenceKV


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
    num_bytes = 0
    for copy in copies:
        segment = segments[copy.segment_id]
        source = slice(copy.offset, copy.offset + copy.length)
        target = slice(copy.target_start, copy.target_start + copy.length)
        k = segment.k[:, source].to(kv.k.device, non_blocking=True)
        if copy.shift != 0:
            if rotation is None:
                raise ValueError(f"copy moves by {copy.shift} tokens, but this model's rotation is not known")
            k = rotation.moved(k, copy.shift)
        kv.k[:, target] = k
        kv.v[:, target] = segment.v[:, source]
        num_bytes += copy.length * kv.geometry.bytes_per_token
    return num_bytes
