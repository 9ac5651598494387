"""
Writes stored rows into the paged cache: in batches to the device, there rotated and written layer by layer.

Temporary memory is one batch of segments and one layer of rows, never all layers of a prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.layout import Plane
from kvshare.kv.movement import Movement
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.device import Device, batches
from kvshare.vllm_connector.worker.paged_cache import PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class RowCopy:
    """
    Tokens of a segment, their target slots, and by how many positions they move.

    Shapes:  rows (H, L, 2, T, D) on the host; slots (len(source),)
    Units:   shift in tokens, may be negative
    """

    rows: torch.Tensor
    source: Span
    shift: int
    slots: NDArray[np.int64]


def write_copies(cache: PagedCache, device: Device, copies: Iterable[RowCopy]) -> None:
    """Raises ValueError if a copy moves and the layout has no movement for a layer."""
    by_segment: defaultdict[int, list[RowCopy]] = defaultdict(list)
    for copy in copies:
        by_segment[copy.rows.data_ptr()].append(copy)
    groups = list(by_segment.values())
    segments = [group[0].rows for group in groups]  # each is copied to the device once
    for batch in batches(segments):
        staged = zip(device.to_device(segments[batch]), groups[batch], strict=True)
        _write(cache, [(rows, copy) for rows, group in staged for copy in group])


def _write(cache: PagedCache, copies: Sequence[tuple[torch.Tensor, RowCopy]]) -> None:
    """Write one batch: copies of segments whose rows are on the device."""
    shifts = np.array([copy.shift for _, copy in copies], np.int64)
    slots, token_shifts = to_device(
        cache.kv_layout.device,
        np.concatenate([copy.slots for _, copy in copies]),
        np.repeat(shifts, [len(copy.source) for _, copy in copies]),
    )
    moved = (
        _moved(plane, number, copies, token_shifts if shifts.any() else None)
        for number, plane in enumerate(cache.kv_layout.planes)
    )
    for layer, (k, v) in enumerate(zip(*moved, strict=True)):
        cache.write_layer(layer, k, v, slots)


def _moved(
    plane: Plane, number: int, copies: Sequence[tuple[torch.Tensor, RowCopy]], shifts: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Rows (T, H, D) of each layer of a plane, rotated to their new positions."""
    turns: dict[Movement, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, movement in enumerate(plane.movements):
        parts = [rows[:, layer, number, copy.source.start : copy.source.end] for rows, copy in copies]
        together = torch.cat([part.transpose(0, 1) for part in parts])
        if shifts is not None and movement is None:
            raise ValueError(f"how {plane.name} of layer {layer} moves is not known")
        if shifts is not None and movement is not None and movement.frequencies:
            if movement not in turns:
                turns[movement] = movement.angles(shifts[:, None])
            together = movement.turned(together, *turns[movement])
        yield together
