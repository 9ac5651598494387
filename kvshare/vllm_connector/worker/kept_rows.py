"""Rows at single positions of a request that a pass overwrites for a while: they are kept, and restored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from delta_tree import Span
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.paged_cache import PagedCache


class KeptRows:
    """
    On the device. A layer must be kept before it is compared or restored.

    Alphabet: P positions, L layers, H kv heads of this rank, D head dim.
    """

    def __init__(
        self,
        cache: PagedCache,
        block_ids: Sequence[int],
        positions: Sequence[int],
        *,
        num_layers: int | None = None,
    ) -> None:
        """`num_layers`: of the pass, from the first on; None: all. Rows of later ones are not kept."""
        (slots,) = to_device(
            cache.kv_layout.device,
            cache.slot_numbers(block_ids, Span(0, max(positions) + 1))[np.array(positions, np.int64)],
        )
        self._numbers = cache.layers_of_parts
        self._parts = [_OfPart(part, slots) for part in cache.parts]
        self._places = {
            layer: (part, place)
            for part, own in zip(self._parts, self._numbers, strict=True)
            for place, layer in enumerate(own)
            if num_layers is None or layer < num_layers
        }

    def keep(self, layer: int) -> None:
        """Copy the rows of a layer from the cache."""
        part, place = self._places[layer]
        part.keep(place)

    def keep_all(self) -> None:
        for layer in self._places:
            self.keep(layer)

    def squared_changes(self, num_layers: int) -> torch.Tensor:
        """Return the squared distance of V in the first layers from the V that was kept, (num_layers, P)."""
        firsts = [[layer for layer in own if layer < num_layers] for own in self._numbers]
        of_parts = [part.squared_changes(len(own)) for part, own in zip(self._parts, firsts, strict=True)]
        if len(of_parts) == 1:
            return of_parts[0]
        changes = of_parts[0].new_empty(num_layers, of_parts[0].shape[1])
        for own, of_part in zip(firsts, of_parts, strict=True):
            changes[own] = of_part
        return changes

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V that were kept, (L, P, H, D) each; only for layers of one shape."""
        (part,) = self._parts
        return part.rows[:, 0], part.rows[:, 1]

    def restore(self) -> None:
        for part, place in self._places.values():
            part.restore(place)


class _OfPart:
    """The kept rows of layers of one shape, which are numbered from 0 here."""

    def __init__(self, cache: PagedCache, slots: torch.Tensor) -> None:
        self._cache, self._slots = cache, slots
        keys, _ = cache.kv_layout.planes
        shape = (len(keys.layers), 2, len(slots), keys.num_heads, keys.dim)
        self.rows = torch.empty(shape, dtype=cache.kv_layout.dtype, device=cache.kv_layout.device)
        self._offsets: dict[tuple[int, ...], torch.Tensor] = {}  # by strides, which layers have in common

    def keep(self, layer: int) -> None:
        cache = self._cache.caches[layer]
        self._cache.elements.read(cache, self._offsets_in(cache), self.rows[layer])

    def squared_changes(self, num_layers: int) -> torch.Tensor:
        """Return (num_layers, P)."""
        now = torch.empty_like(self.rows[:num_layers, 1])
        for layer, cache in enumerate(self._cache.caches[:num_layers]):
            self._cache.elements.read(cache, self._offsets_in(cache)[1:], now[layer])
        if not num_layers:
            return now.new_empty((0, len(self._slots)), dtype=torch.float32)
        kept = self.rows[:num_layers, 1]
        changes = self._cache.value_numbers(now) - self._cache.value_numbers(kept)
        return changes.flatten(2).square().sum(dim=2)

    def restore(self, layer: int) -> None:
        k, v = self.rows[layer]
        self._cache.write_layer(layer, k, v, self._slots)

    def _offsets_in(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the offsets of the elements in a layer's cache, (2, P, H, D)."""
        strides = cache.stride()
        if strides not in self._offsets:
            self._offsets[strides] = self._cache.elements.offsets(strides, self._slots)
        return self._offsets[strides]
