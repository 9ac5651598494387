"""
How often loads, saves and passes go between the host and a GPU, and how: the same number of times however
many runs and layers there are, from and to memory that CUDA knows, and without waiting.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from delta_tree import SegmentId, Span
from tests.kvshare.vllm_connector.worker.closed_memory import TOUCHED, ClosedMemory, exit_code_of
from tests.kvshare.vllm_connector.worker.pretended_gpu import Crossings, Gpu
from tests.kvshare.vllm_connector.worker.small_worker import (
    BLOCKS,
    BYTES_PER_TOKEN,
    DIM,
    HEADS,
    LAYERS,
    late_copies,
    new_worker,
    one_rank,
    use,
)

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadRequest
    from kvshare.vllm_connector.worker.runs import Run
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

NUM_TOKENS = 122  # 40 runs of one token, two copied tokens around each
SHAPES = [(1, 2), (10, 2), (40, 2), (10, 6)]  # runs and layers


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    from kvshare.kv import movement

    movement._on_device.cache_clear()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with one_rank(), torch.inference_mode(), Gpu() as found:
        yield found
    movement._on_device.cache_clear()


class Kernels:
    """An attention implementation that attends to nothing."""

    scale = 1.0

    def __init__(self, update: Callable[..., None]) -> None:
        self.do_kv_cache_update = update

    def forward(self, _: object, query: torch.Tensor, *, output: torch.Tensor) -> None:
        output[:] = query


def worker_on(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_layers: int, *, num_segments: float = 2
) -> ConnectorWorker:
    """A worker with staging buffers for so many segments, and a model whose layers only write and attend."""
    from kvshare.kv.movement import STAYS, Movement
    from kvshare.vllm_connector.worker import device
    from kvshare.vllm_connector.worker.device import GpuDevice
    from kvshare.vllm_connector.worker.partial_forward import PartialForward
    from kvshare.vllm_connector.worker.segment_store import SegmentStore, arena_bytes
    from kvshare.vllm_connector.worker.start import Attached
    from tests.kvshare.vllm_connector.worker.one_stream import OneStream

    class Layers(PartialForward):
        def __init__(self) -> None:
            self._cache, self.max_tokens, self._max_runs = cache, 10**6, 10**6

        def _forward(self, runs: Sequence[Run]) -> None:
            token_ids, positions, slots, _ = self._inputs(runs)
            rows = (token_ids + positions).float()[:, None, None].expand(-1, HEADS, DIM)
            for index, layer in enumerate(self._cache.layers.values()):
                self._cache.write_layer(index, rows, -rows, slots)
                layer.impl.forward(layer, rows, output=torch.empty_like(rows))

    segment = -(-NUM_TOKENS * BYTES_PER_TOKEN * num_layers // LAYERS // 512) * 512
    monkeypatch.setattr(device, "STAGING_BYTES", int(4 * segment * num_segments))
    worker = new_worker(24, shapes=((HEADS, DIM),) * num_layers, device="cuda:0")
    cache, arena = worker.attached.cache, ClosedMemory(arena_bytes(6 * segment))
    store = SegmentStore(arena.buffer, cache.kv_layout, num_heads=HEADS)
    gpu.arenas.append(arena)
    for layer in cache.layers.values():
        layer.impl = Kernels(layer.impl.do_kv_cache_update)
    turns = Movement((1.0, 0.1))
    cache.kv_layout = cache.kv_layout.moving([(turns, STAYS)] * num_layers)
    use(worker, Attached(cache, Layers(), store), can_listen=True)
    there = GpuDevice(OneStream(gpu))
    there.register(store.arena.buffer)
    worker.parts.transfers._device = worker.parts.placeholders._device = there
    worker.parts.placeholders._step_tokens = 10**6  # all in one step
    return worker


@contextmanager
def counted(gpu: Gpu) -> Iterator[Crossings]:
    gpu.seen = Crossings()
    yield gpu.seen


def step(worker: ConnectorWorker, **own: Any) -> None:
    from kvshare.vllm_connector.metadata import StepMetadata

    made = StepMetadata(**own)
    with torch.inference_mode():
        worker.begin(made)
        worker.advance(made)
        worker.save(made)


def copy(worker: ConnectorWorker) -> None:
    while late_copies(worker).jobs:
        late_copies(worker).run()


def save(worker: ConnectorWorker, count: int) -> None:
    from kvshare.vllm_connector.metadata import SaveRequest

    blocks, span = tuple(range(1, BLOCKS)), Span(0, NUM_TOKENS)
    spans = tuple((SegmentId(number), span) for number in range(1, count + 1))
    step(worker, saves=(SaveRequest("s", blocks, spans),))
    copy(worker)
    step(worker)


def load(num_runs: int, *, chooses: bool = False) -> LoadRequest:
    """Runs of one token, and copies that move by one position between them."""
    from kvshare.sharing.plan import RepairOrder
    from kvshare.vllm_connector.metadata import LoadRequest
    from kvshare.vllm_protocol.messages import WireCopy

    ends = [3 * number for number in range(1, num_runs)] + [NUM_TOKENS - 2]
    starts = [1, *(end + 1 for end in ends[:-1])]
    copies = tuple(
        WireCopy(SegmentId(1), start - 1, end - start, start, start - 1)
        for start, end in zip(starts, ends, strict=True)
    )
    pieces = tuple(copy.target for copy in copies)
    order = RepairOrder(pieces, tuple(piece.start for piece in pieces), 2) if chooses else None
    tokens = tuple(range(NUM_TOKENS))
    return LoadRequest("l", tuple(range(1, BLOCKS)), 0, NUM_TOKENS, tokens, copies, order)


@pytest.mark.parametrize("num_segments", [2, 0.5])
@pytest.mark.parametrize(("num_runs", "num_layers"), SHAPES)
def test_the_host_touches_no_byte_of_the_arena(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_runs: int, num_layers: int, num_segments: float
) -> None:
    """
    All that saves and loads do with KV bytes is done by the device: the pages are closed to the host.

    Whether two segments fit a staging buffer, or half of one.
    """
    worker = worker_on(gpu, monkeypatch, num_layers, num_segments=num_segments)
    (arena,) = gpu.arenas

    def save_and_load() -> None:
        with arena.closed():
            save(worker, 3)
            step(worker, loads=(load(num_runs),))
            copy(worker)
            step(worker)
            report = worker.build_connector_worker_meta()
        assert report is not None
        assert not report.failed_saves
        assert (report.loads["l"].failed, report.loads["l"].unreadable) == (False, frozenset())
        assert report.stage_seconds["l"]["verify"] == 0.0  # by the host

    assert exit_code_of(save_and_load) == 0


def test_a_touch_of_the_arena_is_noticed() -> None:
    """Reading one byte suffices."""
    arena = ClosedMemory(8)

    def touch() -> None:
        with arena.closed():
            arena.buffer[3].item()

    assert exit_code_of(touch) == TOUCHED
    assert exit_code_of(lambda: None) == 0


# Of a batch: marks, and work that is one launch each, or one call of the driver.
SAVE_CALLS = {"record": 5, "wait": 1, "gather": 1, "sums": 1, "down": 1}
LOAD_CALLS = {"record": 5, "wait": 1, "up": 1, "check": 1, "scatter": 1}
ONCE = {"begin_load": 1, "compare": 1}  # of a load, whatever its batches


@pytest.mark.parametrize("num_segments", [1, 2, 5])
def test_a_save_goes_down_once_a_segment(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_segments: int
) -> None:
    """
    For each two segments, which fill a staging buffer: once down with their sums, and up with the numbers of
    their blocks. As many calls, whatever is in the buffer.
    """
    worker = worker_on(gpu, monkeypatch, 2)
    with counted(gpu) as seen:
        save(worker, num_segments)
    assert not worker.take_transfers().failed_recving
    num_batches = -(-num_segments // 2)
    assert len(seen.down) == num_segments + num_batches
    assert len(seen.up) == num_batches
    assert (seen.waits, seen.pageable, seen.allocated) == ([], [], [])
    check_calls(seen, SAVE_CALLS, num_batches)


@pytest.mark.parametrize(("num_runs", "num_layers"), SHAPES)
def test_a_load_goes_up_once_a_segment_and_once_for_its_slots(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_runs: int, num_layers: int
) -> None:
    """
    And once for its sums, which are compared there: the result comes down. Its runs go up once as well. The
    model's frequencies went up with an earlier load.
    """
    worker = worker_on(gpu, monkeypatch, num_layers)
    save(worker, 1)
    for is_first in (True, False):
        with counted(gpu) as seen:
            step(worker, loads=(load(num_runs),))
            copy(worker)
        assert len(seen.up) == (4 if is_first else 3)
        assert seen.down == [HEADS * num_layers]
        assert (seen.waits, seen.pageable, seen.allocated) == ([], [], [])
        check_calls(seen, {**LOAD_CALLS, **ONCE}, 1)
        with counted(gpu) as seen:
            step(worker)
        assert len(seen.up) == 1
        assert (seen.down, seen.waits, seen.pageable, seen.allocated) == ([], [], [], [])
        assert loaded(worker).failed is False


def check_calls(seen: Crossings, of_batch: Mapping[str, int], num_batches: int) -> None:
    """Marks of vLLM's steps, a wait for one, and waits for staging buffers come on top."""
    found = Counter(seen.calls)
    for name, count in of_batch.items():
        spare = 2 * num_batches + 6 if name in ("record", "wait") else 0
        assert count * num_batches <= found.pop(name) <= count * num_batches + spare, name
    assert not found


@pytest.mark.parametrize(("num_runs", "num_layers"), SHAPES)
def test_the_scores_of_a_choice_come_down_once(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_runs: int, num_layers: int
) -> None:
    """With what the tail attends to. No step waits for them, however late they are."""
    worker = worker_on(gpu, monkeypatch, num_layers)
    there: Any = worker.parts.placeholders._device._gpu  # type: ignore[attr-defined]  # a GPU's
    save(worker, 1)
    step(worker, loads=(load(num_runs, chooses=True),))
    copy(worker)
    with counted(gpu) as seen:
        there.late_from = time.perf_counter()
        for _ in range(3):
            step(worker)
            assert not worker.take_transfers().finished_recving
        there.late_from = float("inf")
        step(worker)
    assert loaded(worker).repaired
    assert len(seen.up) == 6  # two passes; listeners, and their blocks; slots of the probes; what scores need
    assert len(seen.down) == 1
    assert (seen.waits, seen.pageable) == ([], [])


def test_a_choice_is_so_many_launches_a_layer(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many heads, tokens and probes there are: a launch costs as much as many megabytes."""
    launches = {}
    for num_layers in (4, 8):  # of which 3 and 6 are listened to
        for chooses in (False, True):
            worker = worker_on(gpu, monkeypatch, num_layers)
            save(worker, 1)
            step(worker, loads=(load(10, chooses=chooses),))
            copy(worker)
            with counted(gpu) as seen:
                step(worker)
            launches[num_layers, chooses] = seen.launches
    more = (launches[8, True] - launches[8, False]) - (launches[4, True] - launches[4, False])
    # Where it listens: keys, queries, scale, products, mask, weights, two sums, and the probes' values.
    # Everywhere: the probes' rows read, and written, which takes four here. Keys of 16 bits are three more,
    # and a kernel writes with one.
    assert more == 3 * 9 + 4 * 5


def loaded(worker: ConnectorWorker) -> Any:
    report = worker.build_connector_worker_meta()
    assert report is not None
    return report.loads["l"]
