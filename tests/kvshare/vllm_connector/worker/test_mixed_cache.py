"""A cache whose layers differ in KV heads and head size: every layer is copied, by the model's numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span
from tests.kvshare.vllm_connector.worker.copy_case import pretended, run

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.device import Device
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

BLOCKS, SIZE = 12, 8
SHAPES = ((2, 4), (2, 4), (1, 8), (2, 4), (1, 8), (3, 6))  # heads and dimensions of layers
NUM_TOKENS, SHIFT = 21, 5
BLOCKS_OF_DONOR, BLOCKS_OF_OTHER = (3, 1, 7), (5, 2, 9, 4)


def mixed_cache(*, num_blocks: tuple[int, ...] = (BLOCKS,) * len(SHAPES)) -> PagedCache:
    """Keys of each layer turn in another way. Random numbers everywhere."""
    import torch

    from kvshare.kv.movement import STAYS, Movement
    from kvshare.vllm_connector.worker.mixed_cache import paged_cache

    def update(_: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // SIZE, :, slots % SIZE] = torch.cat([k, v], dim=-1)

    torch.manual_seed(0)
    layers = {
        f"layer {number}": SimpleNamespace(
            kv_cache=torch.randn(blocks, heads, SIZE, 2 * dim),
            impl=SimpleNamespace(do_kv_cache_update=update),
        )
        for number, ((heads, dim), blocks) in enumerate(zip(SHAPES, num_blocks, strict=True))
    }
    cache = paged_cache(layers, block_size=SIZE, dtype=torch.float32)
    cache.set_movements([(Movement((1.0 + layer, 0.1)), STAYS) for layer in range(len(SHAPES))])
    return cache


def rows_of(cache: PagedCache, layer: int, block_ids: tuple[int, ...], span: Span) -> list[torch.Tensor]:
    """K and V of a layer, (T, H, D) each, where vLLM has them."""
    slots = cache.slots(block_ids, span)
    memory = list(cache.layers.values())[layer].kv_cache
    return list(memory[slots // SIZE, :, slots % SIZE].clone().chunk(2, dim=-1))


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Device:
    from kvshare.vllm_connector.worker.device import Device

    return Device() if request.param == "cpu" else pretended(4000)  # a buffer has some layers of a segment


def saved(device: Device, cache: PagedCache) -> Any:
    """All tokens of the donor, in host memory."""
    import torch

    from kvshare.vllm_connector.worker.copies_in_turn import save_work
    from kvshare.vllm_connector.worker.segment_store import SegmentStore

    stored = SegmentStore(torch.empty(1 << 16, dtype=torch.uint8), cache.kv_layout).add(
        SegmentId(1), NUM_TOKENS
    )
    assert not stored.is_saved
    save: Any = SimpleNamespace(request=SimpleNamespace(block_ids=BLOCKS_OF_DONOR), mark=device.mark())
    run(save_work(device, cache, save, [(stored, Span(0, NUM_TOKENS))]))
    return stored


def loaded(device: Device, cache: PagedCache, stored: Any, *, from_blocks: bool = False) -> set[SegmentId]:
    """Into other blocks, SHIFT tokens further. Returns what was found damaged."""
    from kvshare.vllm_connector.metadata import BlockSource, LoadRequest
    from kvshare.vllm_connector.worker.copies_in_turn import load_work
    from kvshare.vllm_protocol.messages import WireCopy

    copy = WireCopy(SegmentId(1), 0, NUM_TOKENS, SHIFT, 0)
    sources = {copy: BlockSource(BLOCKS_OF_DONOR, 0)} if from_blocks else {}
    end = SHIFT + NUM_TOKENS
    request = LoadRequest("r", BLOCKS_OF_OTHER, 0, end, (1,) * end, (copy,), sources=sources)
    load: Any = SimpleNamespace(request=request, held={SegmentId(1): stored})
    work = load_work(device, cache, load, None, mark=device.mark(), is_asleep=False)
    run(work)
    return work.damaged


def test_a_work_is_waited_for_before_it_begins() -> None:
    """Such as one that reads from disk first, after copies from blocks."""
    from kvshare.vllm_connector.worker.copies_in_turn import CopiesInTurn

    first: Any = SimpleNamespace(has_room=True, batches=lambda: iter([None]))
    second: Any = SimpleNamespace(has_room=False, batches=lambda: iter([None]))
    work = CopiesInTurn([first, second])
    batches = work.batches()
    assert work.has_room
    next(batches)
    next(batches)  # between them
    assert not work.has_room
    second.has_room = True
    assert work.has_room
    assert list(batches) == [None]


@pytest.mark.parametrize("from_blocks", [False, True])
def test_every_layer_arrives_moved_in_its_own_way(device: Device, *, from_blocks: bool) -> None:
    """From host memory or from blocks; slots of others are not written."""
    import torch

    cache = mixed_cache()
    assert cache.find_layout(0) is None
    before = [rows_of(cache, layer, BLOCKS_OF_DONOR, Span(0, NUM_TOKENS)) for layer in range(len(SHAPES))]
    head = [rows_of(cache, layer, BLOCKS_OF_OTHER, Span(0, SHIFT)) for layer in range(len(SHAPES))]
    assert loaded(device, cache, saved(device, cache), from_blocks=from_blocks) == set()
    for layer, (k, v) in enumerate(before):
        there_k, there_v = rows_of(cache, layer, BLOCKS_OF_OTHER, Span(SHIFT, SHIFT + NUM_TOKENS))
        number, row = cache.kv_layout.places["k", layer]
        turns = cache.kv_layout.planes[number].movements[row]
        assert turns is not None
        assert torch.allclose(there_k, turns.moved(k, SHIFT), atol=1e-6)
        assert torch.equal(there_v, v)
        assert all(map(torch.equal, head[layer], rows_of(cache, layer, BLOCKS_OF_OTHER, Span(0, SHIFT))))


@pytest.mark.parametrize("part", range(3))
def test_a_flipped_bit_in_any_part_is_found(device: Device, part: int) -> None:
    cache = mixed_cache()
    assert cache.find_layout(0) is None
    stored = saved(device, cache)
    stored.parts[part].rows[-1, -1, 1, 3, 0] += 1
    assert loaded(device, cache, stored) == {SegmentId(1)}


def test_rows_and_changes_have_the_numbers_of_the_models_layers() -> None:
    """What is read, by how much values have changed since, and what is put back."""
    import torch

    from kvshare.vllm_connector.worker.kept_rows import KeptRows

    cache = mixed_cache()
    assert cache.find_layout(0) is None
    whole = cache.read(BLOCKS_OF_OTHER, Span(2, 19))
    for layer in range(len(SHAPES)):
        both = zip(
            cache.kv_layout.of_layer(whole.planes, layer),
            rows_of(cache, layer, BLOCKS_OF_OTHER, Span(2, 19)),
            strict=True,
        )
        assert all(torch.equal(read, there) for read, there in both)
    kept = KeptRows(cache, BLOCKS_OF_OTHER, [4, 11])
    kept.keep_all()
    block, inside = BLOCKS_OF_OTHER[11 // SIZE], 11 % SIZE
    for layer, module in enumerate(cache.layers.values()):
        module.kv_cache[block, 0, inside, -1] += layer
    for num_layers in (1, 3, len(SHAPES)):
        changes = kept.squared_changes(num_layers)
        expected = torch.tensor([[0.0, layer**2] for layer in range(num_layers)])
        assert torch.allclose(changes, expected, atol=1e-4)
    kept.restore()
    again = cache.read(BLOCKS_OF_OTHER, Span(2, 19))
    assert all(map(torch.equal, again.planes, whole.planes))


def test_layers_that_do_not_have_the_same_blocks_are_refused() -> None:
    cache = mixed_cache(num_blocks=(BLOCKS, BLOCKS, BLOCKS + 1, BLOCKS, BLOCKS + 1, BLOCKS))
    assert cache.find_layout(0) == (
        "the layers' KV caches have different numbers of blocks, or of tokens in a block"
    )
