"""
vLLM's paged KV cache of a model whose layers differ in KV heads or head size, as Gemma 4's do.

    layer     0       1       2       3       4       5
    part      0       0       1       0       0       1       a part: the layers of one shape
    slots     the same in all layers

Each part is a `PagedCache` whose layers are numbered from 0; rows are copied part by part. Passes use the
numbers of the model's layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from delta_tree import Span
from kvshare.kv.movement import Movement
from kvshare.kv.sequence import SegmentKV
from kvshare.vllm_connector.worker.paged_cache import PagedCache


class MixedCache(PagedCache):
    """The layers' caches of this worker, of several shapes."""

    def __init__(
        self, layers: Mapping[str, Any], *, block_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(layers, block_size=block_size, dtype=dtype)
        names = list(self.layers)
        self._layers_of = [plane.layers for plane in self.kv_layout.planes if plane.name == "k"]
        self._parts = tuple(
            PagedCache(
                {names[layer]: layers[names[layer]] for layer in own}, block_size=block_size, dtype=dtype
            )
            for own in self._layers_of
        )
        self._places = {
            layer: (part, number)
            for part, own in zip(self._parts, self._layers_of, strict=True)
            for number, layer in enumerate(own)
        }

    @property
    def parts(self) -> tuple[PagedCache, ...]:
        return self._parts

    @property
    def layers_of_parts(self) -> Sequence[Sequence[int]]:
        return self._layers_of

    @property
    def layout(self) -> str:
        return "+".join(dict.fromkeys(part.layout for part in self._parts))

    def set_movements(self, movements: Sequence[tuple[Movement | None, Movement | None]]) -> None:
        super().set_movements(movements)
        for part, own in zip(self._parts, self._layers_of, strict=True):
            part.set_movements([movements[layer] for layer in own])

    def find_layout(self, block_id: int) -> str | None:
        if len({(part.num_blocks, part.kernel_block_size) for part in self._parts}) != 1:
            return "the layers' KV caches have different numbers of blocks, or of tokens in a block"
        if len(dtypes := {part.kv_layout.dtype for part in self._parts}) != 1:
            return f"the layers' KV caches have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
        problems = (part.find_layout(block_id) for part in self._parts)
        return next((problem for problem in problems if problem is not None), None)

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        part, number = self._places[layer]
        part.write_layer(number, k, v, slots)

    def keys(self, layer: int, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        part, number = self._places[layer]
        return part.keys(number, table, num_tokens)

    def read(self, block_ids: Sequence[int], span: Span) -> SegmentKV:
        """Copy a span's KV to the host, (L, len(span), H, D) for each plane of the layout."""
        found = [part.read(block_ids, span) for part in self._parts]
        return SegmentKV((*(rows.k for rows in found), *(rows.v for rows in found)))


def paged_cache(layers: Mapping[str, Any], *, block_size: int, dtype: torch.dtype) -> PagedCache:
    """Make the cache of vLLM's attention modules, given by name: a `MixedCache` if their shapes differ."""
    shapes = {layer.kv_cache.shape[1::2] for layer in layers.values()}  # (H, 2 D)
    kind = PagedCache if len(shapes) == 1 else MixedCache
    return kind(layers, block_size=block_size, dtype=dtype)
