"""
Copies on their way into the paged cache, layer by layer: what one layer needs fits a processor's cache, and
nothing as large as all layers together is ever allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from delta_tree import Span
from kvshare.kv.movement import Movement
from kvshare.kv.segment import SegmentKV
from kvshare.vllm_connector.worker.paged_cache import PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens of a segment, and by how many positions they move."""

    segment: SegmentKV
    tokens: slice
    shift: int


class Laying:
    """Collects what is to be laid, of any number of requests, and writes it."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._parts: list[_Part] = []
        self._slots: list[torch.Tensor] = []

    def add(self, segment: SegmentKV, source: Span, shift: int, slots: torch.Tensor) -> None:
        """
        Tokens of a segment.

        Shapes:  slots (len(source),)
        Units:   shift in tokens, may be negative
        """
        self._parts.append(_Part(segment, slice(source.start, source.end), shift))
        self._slots.append(slots)

    def write(self) -> None:
        """Raises ValueError if something moves and how is not known."""
        if not self._parts:
            return
        slots = torch.cat(self._slots)
        for layer, (k, v) in enumerate(zip(*map(self._rows, range(2)), strict=True)):
            self._cache.write_layer(layer, k, v, slots)

    def _rows(self, plane: int) -> Iterator[torch.Tensor]:
        """Layer by layer (T, H, D), moved, on the device."""
        layout = self._cache.kv_layout
        lengths = torch.tensor([part.tokens.stop - part.tokens.start for part in self._parts])
        shifts = torch.tensor([part.shift for part in self._parts]).repeat_interleave(lengths)
        moves = bool(shifts.any())
        turns: dict[Movement, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, movement in enumerate(layout.planes[plane].movements):
            rows = torch.cat([part.segment.planes[plane][layer, part.tokens] for part in self._parts])
            rows = rows.to(layout.device, non_blocking=True)
            if moves and movement is None:
                raise ValueError(f"how {layout.planes[plane].name} of layer {layer} moves is not known")
            if moves and movement is not None and movement.frequencies:
                if movement not in turns:
                    turns[movement] = movement.angles(shifts.to(layout.device)[:, None])
                rows = movement.turned(rows, *turns[movement])
            yield rows
