"""The KV of one running sequence: a buffer with a slot for every position, laid out and computed in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from delta_tree import Copy, SegmentId, Span
from kvshare.kv.rotation import Rotation, moved_rows
from kvshare.kv.segment import KVGeometry, SegmentKV


class SequenceKV:
    """
    Slots [0, capacity) of one sequence; slot = position.

        k, v: (L, capacity, H, D)      [0, num_tokens) is valid once laid or computed
                                       [num_tokens, capacity) is free

    The token axis stands before the heads, so that a span of one layer is one stretch of memory and laying
    out a copy is one memcpy a layer. Attention takes transposed views, which cost nothing.
    """

    def __init__(self, geometry: KVGeometry, capacity: int) -> None:
        self.geometry = geometry
        self.k = geometry.empty(capacity)
        self.v = geometry.empty(capacity)

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one slot, all layers."""
        return self.geometry.bytes_per_token

    def reserve(self, num_tokens: int) -> None:
        """Grow so that `num_tokens` slots exist; doubling, so that decoding copies rarely."""
        if num_tokens <= self.capacity:
            return
        capacity = max(num_tokens, 2 * self.capacity)
        for name in ("k", "v"):
            old: torch.Tensor = getattr(self, name)
            grown = self.geometry.empty(capacity)
            grown[:, : old.shape[1]] = old
            setattr(self, name, grown)

    def write(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """
        Put new rows into their slots.

        Shapes:  positions (N,) int64; k, v (H, N, D)
        """
        self.k[layer].index_copy_(0, positions, k.transpose(0, 1))
        self.v[layer].index_copy_(0, positions, v.transpose(0, 1))

    def layer(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of slots [0, num_tokens), each (1, H, T, D)."""
        k = self.k[layer, :num_tokens].transpose(0, 1).unsqueeze(0)
        v = self.v[layer, :num_tokens].transpose(0, 1).unsqueeze(0)
        return k, v

    def lay_out(
        self, copies: Sequence[Copy], segments: Mapping[SegmentId, SegmentKV], rotation: Rotation | None
    ) -> int:
        """
        The KV editor: write every copy into its target slots; all other slots stay open.

        Keys are always moved from the original segment, never from a copy that was rotated before.
        Shapes:  segments' k and v (L, T_segment, H, D) -> self.k, self.v (L, capacity, H, D)
        Returns: bytes written
        Raises:  ValueError if a copy moves and the model's rotation is not known
        Source:  KVShare, arXiv:2503.16525, section 4.2
        """
        for copy in copies:
            source = Span(copy.offset, copy.offset + copy.length)
            k, v = moved_rows(segments[copy.segment_id], source, copy.shift, rotation, self.k.device)
            target = slice(copy.target_start, copy.target_start + copy.length)
            self.k[:, target], self.v[:, target] = k, v
        return sum(copy.length for copy in copies) * self.bytes_per_token

    def cut(self, span: Span) -> SegmentKV:
        """A copy of one span's KV in memory of its own, on the host."""
        tokens = slice(span.start, span.end)
        return SegmentKV(*(rows[:, tokens].to("cpu", copy=True).contiguous() for rows in (self.k, self.v)))

    def fork(self, num_tokens: int) -> SequenceKV:
        """Another sequence that starts with this one's first `num_tokens`."""
        other = SequenceKV(self.geometry, self.capacity)
        other.k[:, :num_tokens] = self.k[:, :num_tokens]
        other.v[:, :num_tokens] = self.v[:, :num_tokens]
        return other
