"""
Copies on their way into the paged cache: to the device in batches, there layer by layer turned and written.
Nothing as large as all layers together is ever allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from delta_tree import Span
from kvshare.kv.movement import Movement
from kvshare.vllm_connector.worker.device import Device, batches
from kvshare.vllm_connector.worker.paged_cache import PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens of a segment's rows (H, L, 2, T, D), where they go, and by how many positions they move."""

    rows: torch.Tensor
    tokens: slice
    shift: int
    slots: torch.Tensor


class Laying:
    """Collects what is to be laid, and writes it."""

    def __init__(self, cache: PagedCache, device: Device) -> None:
        self._cache = cache
        self._device = device
        self._parts: list[_Part] = []

    def add(self, rows: torch.Tensor, source: Span, shift: int, slots: torch.Tensor) -> None:
        """
        Tokens of a segment.

        Shapes:  rows (H, L, 2, T, D) on the host; slots (len(source),)
        Units:   shift in tokens, may be negative
        """
        self._parts.append(_Part(rows, slice(source.start, source.end), shift, slots))

    def write(self) -> None:
        """Raises ValueError if something moves and how is not known."""
        for batch in batches([part.rows for part in self._parts]):
            parts = self._parts[batch]
            rows = self._device.to_device([part.rows for part in parts])
            slots = torch.cat([part.slots for part in parts])
            planes = (self._moved(parts, rows, plane) for plane in range(2))
            for layer, (k, v) in enumerate(zip(*planes, strict=True)):
                self._cache.write_layer(layer, k, v, slots)

    def _moved(
        self, parts: Sequence[_Part], rows: Sequence[torch.Tensor], plane: int
    ) -> Iterator[torch.Tensor]:
        """Layer by layer (T, H, D), turned."""
        layout = self._cache.kv_layout
        lengths = torch.tensor([part.tokens.stop - part.tokens.start for part in parts])
        shifts = torch.tensor([part.shift for part in parts]).repeat_interleave(lengths)
        moves = bool(shifts.any())
        turns: dict[Movement, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, movement in enumerate(layout.planes[plane].movements):
            together = torch.cat(
                [
                    each[:, layer, plane, part.tokens].transpose(0, 1)
                    for part, each in zip(parts, rows, strict=True)
                ]
            )
            if moves and movement is None:
                raise ValueError(f"how {layout.planes[plane].name} of layer {layer} moves is not known")
            if moves and movement is not None and movement.frequencies:
                if movement not in turns:
                    turns[movement] = movement.angles(shifts.to(layout.device)[:, None])
                together = movement.turned(together, *turns[movement])
            yield together
