"""
Segments saved and loaded by a CPU and by a GPU: the same bytes, the same sums, and no flipped bit is used.

The GPU is pretended: it is asked for the same work in the same batches, and torch computes it.
"""

from __future__ import annotations

import pytest

from delta_tree import SegmentId
from tests.kvshare.vllm_connector.worker.copy_case import (
    LAYERS,
    differences,
    load,
    new_cache,
    new_store,
    pretended,
    save,
)

# dtype, heads, dim, and layers of the first segment that fit a staging buffer; 0: all of all segments
SHAPES = [
    ("float32", 2, 4, 0),
    ("float32", 2, 4, 3),
    ("bfloat16", 3, 4, 1),
    ("float16", 1, 6, 2),
    ("bfloat16", 2, 5, 1),  # rows of no whole number of 64 or 32 bits
    ("uint8", 3, 3, 2),
    ("float8_e4m3fn", 2, 8, 1),
]


@pytest.mark.parametrize(("dtype", "heads", "dim", "num_fitting"), SHAPES)
def test_a_gpu_does_what_a_cpu_does(dtype: str, heads: int, dim: int, num_fitting: int) -> None:
    """Whatever dtype, dimension and staging buffer: the bytes, their sums, and the rotated rows."""
    assert not any(differences(dtype, heads, dim, num_fitting).values())


@pytest.mark.parametrize("of_gpu", [False, True])
def test_a_flipped_bit_anywhere_is_found_before_the_load_counts(of_gpu: bool) -> None:
    """In each byte of a segment another bit, also in rows that are not copied; the others are whole."""
    import torch

    from kvshare.vllm_connector.worker.device import Device

    cache = new_cache("bfloat16", 2, 4)
    store = new_store(cache)
    device = pretended(2500) if of_gpu else Device()
    for number, rows in enumerate(cache.caches):
        rows[:] = torch.arange(rows.numel()).view(rows.shape) % 251 + number
    segments = save(device, cache, store)
    raw = segments[1].rows.flatten().view(torch.uint8)
    assert len(raw) == 2 * LAYERS * 2 * 3 * 4 * 2
    for place in range(len(raw)):
        raw[place] ^= 1 << place % 8
        assert load(device, cache, segments) == {SegmentId(1)}
        raw[place] ^= 1 << place % 8
    assert load(device, cache, segments) == set()


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("max_bytes", [1 << 20, 4000, 1500, 500])
def test_batches_have_every_layer_once_and_fit(max_bytes: int, *, by_layer: bool) -> None:
    """In the order of segments, or of layers; each layer with all of its heads."""
    from kvshare.vllm_connector.worker.staged_layers import batches, batches_by_layer

    cut = batches_by_layer if by_layer else batches
    cache = new_cache("float32", 2, 4)
    store = new_store(cache)
    segments = [store.add(SegmentId(n), size) for n, size in enumerate([4, 1, 6, 5])]
    found = [(part, batch) for batch in cut(segments, max_bytes) for part in batch]
    layers = [(part.stored.segment_id, layer) for part, _ in found for layer in part.layers]
    everything = [(stored.segment_id, layer) for stored in segments for layer in range(LAYERS)]
    assert sorted(layers) == everything
    if by_layer and max_bytes < 1 << 20:
        whole = {layer: index for index, (_, layer) in enumerate(layers)}
        assert list(whole) == sorted(whole), "a layer is there before the next ones"
        assert all(len({id(part.stored) for part in batch}) == len(batch) for _, batch in found)
    else:
        assert layers == everything
    for part, batch in found:
        others = [each for each in batch if each is not part]
        assert part.offset + part.num_bytes <= max_bytes
        assert all(
            part.offset + part.num_bytes <= each.offset or each.offset + each.num_bytes <= part.offset
            for each in others
        )
        assert sum(rows.nbytes for rows in part.rows) == 2 * len(part.layers) * part.stored.piece_bytes
        assert len(part.rows) == (1 if part.is_whole else 2)
        assert part.part.offset % 16 == 0


def test_a_layer_that_no_buffer_holds_is_refused() -> None:
    """With what is there and what is needed."""
    from kvshare.vllm_connector.worker.staged_layers import batches

    cache = new_cache("float32", 2, 4)
    stored = new_store(cache).add(SegmentId(1), 100)
    with pytest.raises(ValueError, match="one layer of a segment has 6400 bytes, staging 6399"):
        list(batches([stored], 6399))
    assert len(list(batches([stored], 6400))) == LAYERS
