"""
Writes stored rows into the paged cache: in batches to the device, there rotated and written layer by layer.

Temporary memory is one batch of segments and one layer of rows, never all layers of a prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.movement import Movement
from kvshare.vllm_connector.worker.device import Device, batches, to_device
from kvshare.vllm_connector.worker.paged_cache import PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens of a segment, their target slots, and by how many positions they move."""

    tokens: slice
    shift: int
    slots: NDArray[np.int64]


class CopyWriter:
    """Collects copies (`add`), then writes them together (`write`)."""

    def __init__(self, cache: PagedCache, device: Device) -> None:
        self._cache = cache
        self._device = device
        self._segments: dict[int, torch.Tensor] = {}  # by address; each is copied to the device once
        self._parts: defaultdict[int, list[_Part]] = defaultdict(list)

    def add(self, rows: torch.Tensor, source: Span, shift: int, slots: NDArray[np.int64]) -> None:
        """
        Tokens of a segment.

        Shapes:  rows (H, L, 2, T, D) on the host; slots (len(source),)
        Units:   shift in tokens, may be negative
        """
        self._segments[rows.data_ptr()] = rows
        self._parts[rows.data_ptr()].append(_Part(slice(source.start, source.end), shift, slots))

    def write(self) -> None:
        """Raises ValueError if a copy moves and the layout has no movement for a layer."""
        segments, parts = list(self._segments.values()), list(self._parts.values())
        for batch in batches(segments):
            self._write(self._device.to_device(segments[batch]), parts[batch])

    def _write(self, segments: Sequence[torch.Tensor], parts: Sequence[Sequence[_Part]]) -> None:
        """Write one batch; `parts` has those of each segment."""
        device = self._cache.kv_layout.device
        pieces = [(rows, part) for rows, own in zip(segments, parts, strict=True) for part in own]
        lengths = [part.tokens.stop - part.tokens.start for _, part in pieces]
        slots, shifts = to_device(
            device,
            np.concatenate([part.slots for _, part in pieces]),
            np.repeat(np.array([part.shift for _, part in pieces], np.int64), lengths),
        )
        moves = any(part.shift for _, part in pieces)
        planes = (self._moved(pieces, shifts if moves else None, plane) for plane in range(2))
        for layer, (k, v) in enumerate(zip(*planes, strict=True)):
            self._cache.write_layer(layer, k, v, slots)

    def _moved(
        self, pieces: Sequence[tuple[torch.Tensor, _Part]], shifts: torch.Tensor | None, plane: int
    ) -> Iterator[torch.Tensor]:
        """Rows (T, H, D) of each layer, rotated to their new positions."""
        layout = self._cache.kv_layout.planes[plane]
        turns: dict[Movement, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, movement in enumerate(layout.movements):
            together = torch.cat(
                [rows[:, layer, plane, part.tokens].transpose(0, 1) for rows, part in pieces]
            )
            if shifts is not None and movement is None:
                raise ValueError(f"how {layout.name} of layer {layer} moves is not known")
            if shifts is not None and movement is not None and movement.frequencies:
                if movement not in turns:
                    turns[movement] = movement.angles(shifts[:, None])
                together = movement.turned(together, *turns[movement])
            yield together
