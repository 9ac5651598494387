"""Copies from blocks to others on a CPU: whole blocks as they are, and rows of what is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from delta_tree import Span
from tests.kvshare.vllm_connector.worker.copy_case import BLOCK_SIZE, BLOCKS, new_cache

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.block_rows import BlockCopy

SOURCE = (3, 4, 5, 9, 8, 1)  # some follow each other, as a new pool's do, and some do not
TARGET = (14, 15, 16, 20, 21, 19)


def block_copy(cache: Any, source: Span, target: int, shift: int = 0) -> BlockCopy:
    from kvshare.vllm_connector.worker.block_rows import BlockCopy

    return BlockCopy(SOURCE, source, shift, cache.slot_numbers(TARGET, Span(target, target + len(source))))


def filled(dtype: str = "float32") -> Any:
    import torch

    cache = new_cache(dtype, 2, 4)
    torch.manual_seed(0)
    for layer in cache.caches:
        layer.copy_(torch.randn(layer.shape).to(layer.dtype))
    return cache


def rows_of(cache: Any, block_ids: Sequence[int], span: Span) -> list[torch.Tensor]:
    return [plane.clone() for plane in cache.read(block_ids, span).planes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("source", "target", "num_as_they_are"),
    [
        (Span(0, 40), 0, 5),
        (Span(3, 45), 3, 4),  # the edges are rows
        (Span(8, 23), 16, 1),  # other blocks of the prompt, at the same place inside
        (Span(3, 45), 2, 0),  # at another place inside of the blocks
        (Span(9, 15), 9, 0),  # less than a block
        (Span(11, 19), 11, 0),  # parts of two blocks
    ],
)
def test_rows_arrive_and_others_stay(dtype: str, source: Span, target: int, num_as_they_are: int) -> None:
    """What is copied equals its source, to the bit, and nothing else is written."""
    import torch

    from kvshare.vllm_connector.worker import block_rows

    cache = filled(dtype)
    wanted = rows_of(cache, SOURCE, source)
    before = [layer.clone() for layer in cache.caches]
    with patch.object(block_rows, "_copy_blocks", wraps=block_rows._copy_blocks) as as_they_are:
        block_rows.copy_by_torch(cache, [block_copy(cache, source, target)])
    assert sum(len(call.args[1]) for call in as_they_are.call_args_list) == num_as_they_are
    into = Span(target, target + len(source))
    for rows, right in zip(rows_of(cache, TARGET, into), wanted, strict=True):
        assert torch.equal(rows.view(torch.uint8), right.view(torch.uint8))
    written = torch.zeros(BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    written.view(-1)[torch.from_numpy(cache.slot_numbers(TARGET, into))] = True
    for layer, old in zip(cache.caches, before, strict=True):
        changed = (layer.view(torch.uint8) != old.view(torch.uint8)).any(dim=-1).any(dim=1)
        assert not (changed & ~written).any()


def test_whole_blocks_and_moved_rows_in_one_load() -> None:
    """Three copies, of which the second is moved."""
    import torch

    from kvshare.vllm_connector.worker.block_rows import copy_by_torch

    cache = filled()
    k, _ = rows_of(cache, SOURCE, Span(0, 48))
    copies = [
        block_copy(cache, Span(0, 16), 0),
        block_copy(cache, Span(18, 30), 21, shift=3),
        block_copy(cache, Span(40, 47), 40),
    ]
    copy_by_torch(cache, copies)
    found, _ = rows_of(cache, TARGET, Span(0, 48))
    movement = cache.kv_layout.planes[0].movements[0]
    assert torch.equal(found[:, :16], k[:, :16])
    assert torch.allclose(found[:, 21:33], movement.moved(k[:, 18:30], 3), atol=1e-6)
    assert torch.equal(found[:, 40:47], k[:, 40:47])
