"""KV caches whose blocks cannot be read: nothing is shared then, for a stated reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

N, H, D = 8, 2, 4


def paged_cache(*num_blocks: int, block_size: int = N) -> Any:
    """A layer with as many blocks as given, for each number; the backend drops what it is to write."""
    import torch

    from kvshare.vllm_connector.worker.paged_cache import PagedCache

    backend = SimpleNamespace(do_kv_cache_update=lambda layer, k, v, cache, slots: None)
    layers = {
        f"layer {number}": SimpleNamespace(kv_cache=torch.zeros(blocks, H, N, 2 * D), impl=backend)
        for number, blocks in enumerate(num_blocks)
    }
    return PagedCache(layers, block_size=block_size)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (lambda: paged_cache(4, 5), "different shapes"),
        (lambda: paged_cache(4, 4, block_size=N + 1), "do not divide 9"),
        (lambda: paged_cache(4, 4), "layout of the attention backend's KV cache is not understood"),
    ],
)
def test_the_reason_is_stated(cache: Any, reason: str) -> None:
    """Layers of different sizes, blocks that the kernel's do not divide, and rows that do not come back."""
    assert reason in cache().find_layout(0)
