"""
Segments saved and loaded by a CPU and by a GPU: the same bytes, the same sums, and no flipped bit is used.

The GPU is pretended: it is asked for the same work in the same batches, and torch computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.copying import Work
    from kvshare.vllm_connector.worker.device import Device
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored

BLOCKS, BLOCK_SIZE, LAYERS = 24, 8, 5
# dtype, heads, dim, and layers of the first segment that fit a staging buffer; 0: all of all segments
SHAPES = [
    ("float32", 2, 4, 0),
    ("float32", 2, 4, 3),
    ("bfloat16", 3, 4, 1),
    ("float16", 1, 6, 2),
    ("bfloat16", 2, 5, 1),  # rows of no whole number of 64 or 32 bits
    ("uint8", 3, 3, 2),
]
SPANS = (Span(0, 37), Span(37, 40), Span(40, 105), Span(113, 114))


def new_cache(dtype: str, heads: int, dim: int) -> PagedCache:
    import torch

    from kvshare.kv.movement import STAYS, Movement
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

    def update(_: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat([k, v], dim=-1)

    impl = SimpleNamespace(do_kv_cache_update=update)
    shape = (BLOCKS, heads, BLOCK_SIZE, 2 * dim)
    caches = [torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(LAYERS)]
    layers = {str(n): SimpleNamespace(kv_cache=cache, impl=impl) for n, cache in enumerate(caches)}
    cache = PagedCache(layers, block_size=BLOCK_SIZE)
    assert cache.find_layout(0) is None
    turns = Movement((1.0, 0.1)) if dim % 2 == 0 else STAYS
    cache.kv_layout = cache.kv_layout.moving([(turns, STAYS)] * LAYERS)
    return cache


def new_store(cache: PagedCache) -> SegmentStore:
    import torch

    from kvshare.vllm_connector.worker.segment_store import SegmentStore

    buffer = torch.full((1 << 20,), 77, dtype=torch.uint8)
    return SegmentStore(buffer, cache.kv_layout, num_heads=cache.kv_layout.planes[0].num_heads)


def pretended(store: SegmentStore, buffer_bytes: int) -> Device:
    import torch

    from kvshare.vllm_connector.worker.device import GpuDevice
    from kvshare.vllm_connector.worker.gpu_copies import Lane
    from tests.kvshare.vllm_connector.worker.one_stream import OneStream
    from tests.kvshare.vllm_connector.worker.pretended_gpu import Gpu

    made = GpuDevice.__new__(GpuDevice)  # with buffers of another size
    made._gpu = OneStream(Gpu(), torch.device("cpu"))
    made._gpu.register(store.arena.buffer)
    made._loads, made._saves = (Lane(made._gpu, num_buffers=2, buffer_bytes=buffer_bytes) for _ in range(2))
    return made


def run(work: Work) -> Any:
    num_batches = 1 + sum(1 for _ in work.batches())
    assert work.is_past
    work.finish()
    return num_batches


def save(device: Device, cache: PagedCache, store: SegmentStore) -> list[Stored]:
    targets = [(store.add(SegmentId(n), len(span)), span) for n, span in enumerate(SPANS)]
    run(device.save(cache, tuple(range(1, BLOCKS)), targets, mark=device.mark()))
    return [stored for stored, _ in targets]


def load(device: Device, cache: PagedCache, segments: Sequence[Stored]) -> set[SegmentId]:
    """Parts of the segments, in a different order, each moved in its own way."""
    from kvshare.vllm_connector.worker.copy_writer import RowCopy

    blocks, position, copies = tuple(range(BLOCKS - 1, 0, -1)), 3, []
    is_rotated = cache.kv_layout.dtype.is_floating_point
    for number, stored in enumerate([*segments, segments[2]]):
        source = Span(0, 1) if stored.num_tokens == 1 else Span(number % 2, stored.num_tokens - 1)
        slots = cache.slot_numbers(blocks, Span(position, position + len(source)))
        copies.append(RowCopy(stored, source, 5 * number - 7 if is_rotated else 0, slots))
        position += len(source)
    work = device.load(cache, lambda: copies, mark=device.mark())
    run(work)
    return work.damaged


@pytest.mark.parametrize(("dtype", "heads", "dim", "num_fitting"), SHAPES)
def test_a_gpu_does_what_a_cpu_does(dtype: str, heads: int, dim: int, num_fitting: int) -> None:
    """Whatever dtype, dimension and staging buffer: the bytes, their sums, and the rotated rows."""
    import torch

    from kvshare.vllm_connector.worker.device import Device

    cache = new_cache(dtype, heads, dim)
    piece_bytes = 2 * 65 * dim * cache.kv_layout.dtype.itemsize
    stores = [new_store(cache), new_store(cache)]
    gpu = pretended(stores[1], (num_fitting * heads * (piece_bytes + 15)) or 1 << 20)
    generator = torch.Generator().manual_seed(0)
    for rows in cache.caches:
        rows[:] = (100 * torch.rand(rows.shape, generator=generator)).to(rows.dtype)
    found = [save(device, cache, store) for device, store in zip((Device(), gpu), stores, strict=True)]
    for own, other in zip(*found, strict=True):
        assert torch.equal(own.rows, other.rows)
        assert own.sums is not None
        assert other.sums is not None
        assert own.sums.tolist() == other.sums.tolist()
    written = []
    for device, segments in zip((Device(), gpu), found, strict=True):
        for rows in cache.caches:
            rows.zero_()
        assert load(device, cache, segments) == set()
        written.append([rows.clone() for rows in cache.caches])
    assert all(map(torch.equal, *written))
    assert all(rows.any() for rows in written[0])


@pytest.mark.parametrize("of_gpu", [False, True])
def test_a_flipped_bit_anywhere_is_found_before_the_load_counts(of_gpu: bool) -> None:
    """In each byte of a segment another bit, also in rows that are not copied; the others are whole."""
    import torch

    from kvshare.vllm_connector.worker.device import Device

    cache = new_cache("bfloat16", 2, 4)
    store = new_store(cache)
    device = pretended(store, 2500) if of_gpu else Device()
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


@pytest.mark.parametrize("max_bytes", [1 << 20, 4000, 1500, 500])
def test_batches_have_every_layer_once_and_fit(max_bytes: int) -> None:
    """In the order of segments; each layer with all of its heads."""
    from kvshare.vllm_connector.worker.staged_layers import batches

    cache = new_cache("float32", 2, 4)
    store = new_store(cache)
    segments = [store.add(SegmentId(n), size) for n, size in enumerate([4, 1, 6, 5])]
    found = [(part, batch) for batch in batches(segments, max_bytes) for part in batch]
    layers = [(part.stored.segment_id, layer) for part, _ in found for layer in part.layers]
    assert layers == [(stored.segment_id, layer) for stored in segments for layer in range(LAYERS)]
    for part, batch in found:
        others = [each for each in batch if each is not part]
        assert part.offset + part.num_bytes <= max_bytes
        assert all(
            part.offset + part.num_bytes <= each.offset or each.offset + each.num_bytes <= part.offset
            for each in others
        )
        assert sum(rows.nbytes for rows in part.rows) == 2 * len(part.layers) * part.stored.piece_bytes
        assert len(part.rows) == len(part.parts) == (1 if part.is_whole else 2)
        assert all(each.offset % 16 == 0 for each in part.parts)


def test_a_layer_that_no_buffer_holds_is_refused() -> None:
    """With what is there and what is needed."""
    from kvshare.vllm_connector.worker.staged_layers import batches

    cache = new_cache("float32", 2, 4)
    stored = new_store(cache).add(SegmentId(1), 100)
    with pytest.raises(ValueError, match="one layer of a segment has 6400 bytes, staging 6399"):
        list(batches([stored], 6399))
    assert len(list(batches([stored], 6400))) == LAYERS
