"""Segments saved from small caches and loaded into others, by a CPU and by a pretended GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from delta_tree import SegmentId, Span

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.copying import Work
    from kvshare.vllm_connector.worker.device import Device
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored

BLOCKS, BLOCK_SIZE, LAYERS = 24, 8, 5
SPANS = (Span(0, 37), Span(37, 40), Span(40, 105), Span(113, 114))


def new_cache(dtype: str, heads: int, dim: int) -> PagedCache:
    import torch

    from kvshare.kv.movement import STAYS, Movement
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

    def update(_: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat([k, v], dim=-1).to(cache.dtype)

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


def pretended(buffer_bytes: int, kernels: Any = None, block_kernels: Any = None) -> Device:
    """A GPU with two staging buffers each way. Kernels are our modules', else torch does their work."""
    import torch

    from kvshare.vllm_connector.worker.device import GpuDevice
    from kvshare.vllm_connector.worker.gpu_copies import Lane
    from tests.kvshare.vllm_connector.worker.one_stream import OneStream
    from tests.kvshare.vllm_connector.worker.pretended_gpu import Gpu

    made = GpuDevice.__new__(GpuDevice)  # with buffers of another size
    made._gpu = one = OneStream(Gpu(), torch.device("cpu"))
    one._kernels, one._block_kernels, one._reads_host = kernels, block_kernels, kernels is not None
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


def copy_blocks(device: Device, cache: PagedCache) -> int:
    """From blocks of the whole cache into others, one copy longer than a block, each moved in its own way."""
    from kvshare.vllm_connector.worker.block_rows import BlockCopy

    sources, targets = tuple(range(1, BLOCKS // 2)), tuple(range(BLOCKS - 1, BLOCKS // 2, -1))
    is_rotated, position, copies = cache.kv_layout.dtype.is_floating_point, 2, []
    for number, span in enumerate((Span(3, 41), Span(41, 42), Span(56, 80))):
        slots = cache.slot_numbers(targets, Span(position, position + len(span)))
        copies.append(BlockCopy(sources, span, 5 * number - 4 if is_rotated else 0, slots))
        position += len(span)
    num_batches: int = run(device.copy_blocks(cache, lambda: copies, mark=device.mark()))
    return num_batches


def differences(
    dtype: str, heads: int, dim: int, num_fitting: int, kernels: Any = None, block_kernels: Any = None
) -> dict[str, int]:
    """
    What a GPU does otherwise than a CPU: stored numbers, sums, written bytes, segments found damaged.

    `num_fitting`: layers of a segment that fit a staging buffer; 0: everything does.
    """
    import torch

    from kvshare.vllm_connector.worker.device import Device

    cache = new_cache(dtype, heads, dim)
    piece_bytes = 2 * 65 * dim * cache.kv_layout.dtype.itemsize
    stores = [new_store(cache), new_store(cache)]
    gpu = pretended((num_fitting * heads * (piece_bytes + 15)) or 1 << 20, kernels, block_kernels)
    generator = torch.Generator().manual_seed(0)
    for rows in cache.caches:
        rows[:] = (100 * torch.rand(rows.shape, generator=generator)).to(rows.dtype)
    found = [save(device, cache, store) for device, store in zip((Device(), gpu), stores, strict=True)]
    written, copied, num_damaged = [], [], 0
    for device, segments in zip((Device(), gpu), found, strict=True):
        for rows in cache.caches:
            rows.zero_()
        num_damaged += len(load(device, cache, segments))
        written.append(torch.stack(list(cache.caches)).view(torch.uint8))
    for device in (Device(), gpu):
        for rows, before in zip(cache.caches, written[0], strict=True):
            rows.view(torch.uint8)[:] = before
        copy_blocks(device, cache)
        copied.append(torch.stack(list(cache.caches)).view(torch.uint8))
    assert (copied[0] != written[0]).any()
    assert written[0].any(dim=-1).any(dim=-1).any(dim=-1).all(dim=0).any()
    pairs = list(zip(*found, strict=True))
    return {
        "stored": sum(int((own.rows != other.rows).sum()) for own, other in pairs),
        "sums": sum(int((own.sums != other.sums).sum()) for own, other in pairs),
        "written": int((written[0] != written[1]).sum()),
        "copied": int((copied[0] != copied[1]).sum()),
        "damaged": num_damaged,
    }
