"""Tiles of a batch, between host memory and staging. The kernel that copies them has tests of its own."""

from __future__ import annotations

import ctypes

import pytest
import torch

from delta_tree import SegmentId
from kvshare.kv.layout import KVLayout
from kvshare.vllm_connector.worker.kernel_host_tables import TILE_WORDS, WORD_BYTES, tiles
from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored
from kvshare.vllm_connector.worker.staged_layers import StagedLayers, batches, batches_by_layer

CPU = torch.device("cpu")
LAYERS, HEADS, DIM = 7, 3, 64


def stored(*lengths: int, dim: int = DIM, dtype: torch.dtype = torch.bfloat16) -> list[Stored]:
    """Segments of these numbers of tokens, each byte of them different from its neighbours."""
    layout = KVLayout.uniform(LAYERS, HEADS, dim, dtype=dtype, device=CPU)
    buffer = (torch.arange(8 << 20) * 97 % 251).to(torch.uint8)
    store = SegmentStore(buffer, layout)
    return [store.add(SegmentId(number), length) for number, length in enumerate(lengths)]


def copied(batch: list[StagedLayers], num_bytes: int) -> torch.Tensor:
    """What a copy of all tiles leaves in staging, and 77 where nothing is copied."""
    table, staging = tiles(batch), torch.full((num_bytes,), 77, dtype=torch.uint8)
    assert table is not None
    assert table[2].max() <= TILE_WORDS
    for address, offset, words in table.T.tolist():
        ctypes.memmove(staging.data_ptr() + offset * WORD_BYTES, address, words * WORD_BYTES)
    return staging


@pytest.mark.parametrize("max_bytes", [1 << 20, 400_000, 240_000])
@pytest.mark.parametrize("by_layer", [True, False])
def test_all_rows_of_a_batch_lie_at_its_offsets(max_bytes: int, *, by_layer: bool) -> None:
    """In batches of all layers, of some, and of one; segments of one token and of many tiles."""
    found = stored(300, 1, 24, 97)
    made = batches_by_layer(found, max_bytes) if by_layer else list(batches(found, max_bytes))
    assert sum(part.num_bytes for batch in made for part in batch) == sum(each.rows.nbytes for each in found)
    for batch in made:
        staging, is_copied = copied(batch, max_bytes), torch.zeros(max_bytes, dtype=torch.bool)
        for part in batch:
            rows = part.stored.rows[:, part.layers.start : part.layers.stop]
            assert torch.equal(part.view(staging).view(torch.uint8), rows.contiguous().view(torch.uint8))
            is_copied[part.offset : part.offset + part.num_bytes] = True
        assert (staging[~is_copied] == 77).all()


def test_pieces_that_are_not_whole_words_are_left_to_the_driver() -> None:
    """Three numbers of eight bits a row: 30 bytes a piece."""
    (segment,) = stored(5, dim=3, dtype=torch.uint8)
    assert tiles([StagedLayers(segment, range(2))]) is None


def test_tiles_past_staging_are_refused() -> None:
    """Before anything is launched."""
    kernels = pytest.importorskip("kvshare.vllm_connector.worker.kernels", reason="it needs Triton")
    (segment,) = stored(40)
    table, size = tiles([StagedLayers(segment, range(2))]), 2 * HEADS * segment.piece_bytes
    with pytest.raises(ValueError, match=f"end at byte {size} of staging, which has {size - 16}"):
        kernels.copy_host(torch.empty(size - 16, dtype=torch.uint8), table, up=True)
