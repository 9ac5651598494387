"""
Writes stored rows into the paged cache with torch and vLLM's own kernels, layer by layer: on a CPU, and on a
GPU for blocks that our kernels cannot address.

Temporary memory is one layer of rows of a batch, never all layers of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.layout import Plane
from kvshare.kv.movement import Movement
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.cache_dtype import EIGHT_BITS
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import Stored


@dataclass(frozen=True, slots=True, eq=False)
class RowCopy:
    """
    Tokens of a segment, their target slots, and by how many positions they move.

    Shapes:  slots (len(source),)
    Units:   shift in tokens, may be negative
    """

    stored: Stored
    source: Span
    shift: int
    slots: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the whole segment."""
        return self.stored.num_tokens


class Placement(Protocol):
    """The rows to write, their slots, and by how many positions they move. See `RowCopy`."""

    @property
    def source(self) -> Span: ...
    @property
    def shift(self) -> int: ...
    @property
    def slots(self) -> NDArray[np.int64]: ...


class LayerRows(NamedTuple):
    """
    Some layers of the rows of a copy, on the cache's device.

    Shapes:  rows (H, len(layers), 2, T, D)
    """

    rows: torch.Tensor
    layers: range
    copy: Placement


def write_layers(
    cache: PagedCache,
    copies: Sequence[LayerRows],
    *,
    before_layer: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a batch. Raises ValueError if a copy moves and the layout has no movement for a layer."""
    ends = sorted({end for copy in copies for end in (copy.layers.start, copy.layers.stop)})
    for start, stop in pairwise(ends):  # all layers between two ends have the same copies
        own = [copy for copy in copies if start in copy.layers]
        if own:
            _write(cache, own, range(start, stop), before_layer)


def _write(
    cache: PagedCache, copies: Sequence[LayerRows], layers: range, before_layer: Callable[[int], object]
) -> None:
    shifts = np.array([copy.shift for _, _, copy in copies], np.int64)
    slots, token_shifts = to_device(
        cache.kv_layout.device,
        np.concatenate([copy.slots for _, _, copy in copies]),
        np.repeat(shifts, [len(copy.source) for _, _, copy in copies]),
    )
    shifts_there = token_shifts if shifts.any() else None
    moved = [
        _moved(plane, number, copies, layers, shifts_there)
        for number, plane in enumerate(cache.kv_layout.planes)
    ]
    for layer in layers:
        before_layer(layer)
        k, v = (next(rows) for rows in moved)
        cache.write_layer(layer, k, v, slots)


def _moved(
    plane: Plane, number: int, copies: Sequence[LayerRows], layers: range, shifts: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Yield the rows (T, H, D) of each layer of a plane, rotated to their new positions."""
    turns: dict[Movement, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in layers:
        movement = plane.movements[layer]
        parts = [
            rows[:, layer - own.start, number, copy.source.start : copy.source.end]
            for rows, own, copy in copies
        ]
        together = torch.cat([part.transpose(0, 1) for part in parts])
        if shifts is not None and movement is None:
            raise ValueError(f"how {plane.name} of layer {layer} moves is not known")
        if shifts is not None and movement is not None and movement.frequencies:
            if movement not in turns:
                turns[movement] = movement.angles(shifts[:, None])
            turned = movement.turned(together, *turns[movement])
            stays = (shifts == 0)[:, None, None]  # unmoved rows keep every bit: many 8-bit numbers are -0
            together = torch.where(stays, together, turned) if together.dtype in EIGHT_BITS else turned
        yield together
