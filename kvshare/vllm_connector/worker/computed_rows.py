"""
The rows that vLLM's model computes, before its cache quantises them. The self-test compares stored rows with
them, and uses them to see how rows move, without the error of 8 bits.

Alphabet: L layers, T tokens, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvshare.kv.layout import Plane
from kvshare.kv.sequence import SegmentKV
from kvshare.vllm_connector.worker.paged_cache import PagedCache


class ComputedRows:
    """Records the K and V that the passes inside `recorded` compute, in the order of their rows."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by layer

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Wrap the attention kernels of all layers, which receive K and V."""
        impls = [layer.impl for layer in self._cache.layers.values()]
        for index, impl in enumerate(impls):
            impl.forward = self._standing_in(index, impl.forward)
        try:
            yield
        finally:
            for impl in impls:
                del impl.forward  # the class's own method is in effect again

    def _standing_in(self, index: int, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            self._found.setdefault(index, []).append((key.clone(), value.clone()))
            return kernel(layer, query, key, value, *rest, **options)

        return forward

    def read(self) -> SegmentKV:
        """Return (L, T, H, D) of each plane, on the host. Raises ValueError if a layer was not called."""
        layout = self._cache.kv_layout
        if len(self._found) != layout.num_layers:
            raise ValueError(f"{len(self._found)} of {layout.num_layers} layers were called")
        return SegmentKV(tuple(torch.stack(list(self._of_plane(plane))) for plane in layout.planes))

    def _of_plane(self, plane: Plane) -> Iterator[torch.Tensor]:
        """Yield the rows of each layer of a plane, (T, H, D)."""
        for layer in plane.layers:
            k, v = (torch.cat(rows) for rows in zip(*self._found[layer], strict=True))
            yield (k if plane.name == "k" else v).view(-1, plane.num_heads, plane.dim).cpu()
