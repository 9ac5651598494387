"""
How K and V lie inside a block of vLLM's paged cache. Writing is vLLM's business; reading needs to know.

A layer's cache is (B, H, N, 2 D) for every backend, whatever its strides. What a backend makes of the inside
of a block is found out by writing random rows through vLLM and looking which layout gives them back:

    content     [..., :D] is K, [..., D:] is V                   FlashAttention, Triton, FlashInfer
    transposed  per head N*D elements of K as (D, N), then V     CPU, vector kernels
    learned     any other permutation inside a block             CPU, AMX and the like

Alphabet: B blocks, N tokens per block, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

WriteRows = Callable[[torch.Tensor, torch.Tensor], None]  # k, v (N, H, D) into the probed block


class BlockLayout(ABC):
    """Reads blocks that were copied out of a cache: (B, H, N, 2 D), contiguous."""

    name: str

    @abstractmethod
    def rows(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Views or copies of K and V by token.

        Shapes:  blocks (B, H, N, 2 D) -> k, v (B, N, H, D)
        """


class ContentLayout(BlockLayout):
    name = "content"

    def rows(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = blocks.permute(0, 2, 1, 3).chunk(2, dim=-1)
        return k, v


class TransposedLayout(BlockLayout):
    name = "transposed"

    def rows(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks, num_heads, num_tokens, width = blocks.shape
        halves = blocks.view(num_blocks, num_heads, 2, num_tokens * width // 2)
        k = halves[:, :, 0].view(num_blocks, num_heads, width // 2, num_tokens).permute(0, 3, 1, 2)
        v = halves[:, :, 1].view(num_blocks, num_heads, num_tokens, width // 2).permute(0, 2, 1, 3)
        return k, v


class LearnedLayout(BlockLayout):
    """`k_places`, `v_places`: (N, H, D) int64, where in a flattened block each element lies."""

    name = "learned"

    def __init__(self, k_places: torch.Tensor, v_places: torch.Tensor) -> None:
        self._k_places = k_places
        self._v_places = v_places

    def rows(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = blocks.flatten(start_dim=1)
        return flat[:, self._k_places], flat[:, self._v_places]


def find_layout(block: torch.Tensor, write: WriteRows) -> BlockLayout | None:
    """
    The layout that gives back what `write` puts into `block`, or None. The block is overwritten.

    Shapes:  block (H, N, 2 D), a view into the cache
    """
    num_heads, num_tokens, width = block.shape
    shape = (num_tokens, num_heads, width // 2)
    candidates: list[Callable[[], BlockLayout | None]] = [
        ContentLayout,
        TransposedLayout,
        lambda: _learn(block, write, shape),
    ]
    for make in candidates:
        layout = make()
        if layout is not None and _gives_back(layout, block, write, shape):
            return layout
    return None


def _gives_back(
    layout: BlockLayout, block: torch.Tensor, write: WriteRows, shape: tuple[int, int, int]
) -> bool:
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(shape, generator=generator).to(dtype=block.dtype, device=block.device) for _ in range(2)
    )
    write(k, v)
    read_k, read_v = layout.rows(block.contiguous().unsqueeze(0))
    return torch.equal(read_k[0], k) and torch.equal(read_v[0], v)


def _learn(block: torch.Tensor, write: WriteRows, shape: tuple[int, int, int]) -> LearnedLayout | None:
    """Write every element's number bit by bit; where its bits turn up is its place."""
    count = shape[0] * shape[1] * shape[2]
    numbers = torch.arange(count, device=block.device).view(shape)
    places = []
    for is_key in (True, False):
        found = torch.zeros(block.numel(), dtype=torch.int64, device=block.device)
        for bit in range(count.bit_length()):
            found += _landed((numbers >> bit) & 1, block, write, is_key=is_key).long() << bit
        where = _landed(torch.ones_like(numbers), block, write, is_key=is_key).nonzero().flatten()
        place = torch.full((count,), -1, dtype=torch.int64, device=block.device)
        place[found[where].clamp(max=count - 1)] = where
        if len(where) != count or int(place.min()) < 0:
            return None  # not a permutation: quantised, or not stored at all
        places.append(place.view(shape))
    return LearnedLayout(*places)


def _landed(marks: torch.Tensor, block: torch.Tensor, write: WriteRows, *, is_key: bool) -> torch.Tensor:
    """Which elements of the flattened block are set after writing `marks`."""
    block.zero_()
    rows = marks.to(block.dtype)
    zeros = torch.zeros_like(rows)
    write(rows, zeros) if is_key else write(zeros, rows)
    return block.contiguous().flatten() != 0
