"""
How often loads, saves and passes go between the host and a GPU, and how: the same number of times however
many runs and layers there are, from and to memory that CUDA knows, and without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from delta_tree import SegmentId, Span
from tests.kvshare.vllm_connector.worker.pretended_gpu import CUDA, Crossings, Gpu
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
    from kvshare.vllm_connector.worker.partial_forward import Run
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


def worker_on(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_layers: int) -> ConnectorWorker:
    """The worker with a staging buffer for two segments, and a model whose layers only write and attend."""
    from kvshare.kv.movement import STAYS, Movement
    from kvshare.vllm_connector.worker import device
    from kvshare.vllm_connector.worker.partial_forward import PartialForward
    from kvshare.vllm_connector.worker.start import Attached

    class OneStream(device.CudaDevice):
        """All in one order, as on the CPU."""

        mark, seconds = device.Device.mark, device.Device.seconds
        run_after, is_reached = device.Device.run_after, device.Device.is_reached

        def __init__(self) -> None:
            self._device, self._staging = CUDA, torch.zeros(device.STAGING_BYTES, device=CUDA).byte()

    class Layers(PartialForward):
        def __init__(self) -> None:
            self._cache, self._max_tokens, self._max_runs = cache, 10**6, 10**6

        def _forward(self, runs: Sequence[Run]) -> None:
            token_ids, positions, slots, _ = self._inputs(runs)
            rows = (token_ids + positions).float()[:, None, None].expand(-1, HEADS, DIM)
            for index, layer in enumerate(self._cache.layers.values()):
                self._cache.write_layer(index, rows, -rows, slots)
                layer.impl.forward(layer, rows, output=torch.empty_like(rows))

    segment = -(-NUM_TOKENS * BYTES_PER_TOKEN * num_layers // LAYERS // 512) * 512
    monkeypatch.setattr(device, "STAGING_BYTES", 2 * segment)
    worker = new_worker(24, num_layers=num_layers, device="cuda:0")
    cache, store = worker.attached.cache, worker.attached.store
    for layer in cache.layers.values():
        layer.impl = Kernels(layer.impl.do_kv_cache_update)
    turns = Movement((1.0, 0.1))
    cache.kv_layout = cache.kv_layout.moving([(turns, STAYS)] * num_layers)
    use(worker, Attached(cache, Layers(), store), can_listen=True)
    worker.parts.transfers._device = worker.parts.placeholders._device = OneStream()
    worker.parts.placeholders._step_tokens = 10**6  # all in one step
    gpu.register(store.arena.buffer)
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


@pytest.mark.parametrize("num_segments", [1, 2, 5])
def test_a_save_goes_down_once_a_segment(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_segments: int
) -> None:
    """And up once for each two segments, which fill the staging, with the numbers of their blocks."""
    worker = worker_on(gpu, monkeypatch, 2)
    with counted(gpu) as seen:
        save(worker, num_segments)
    assert not worker.take_transfers().failed_recving
    assert len(seen.down) == num_segments
    assert len(seen.up) == -(-num_segments // 2)
    assert (seen.waits, seen.pageable, seen.allocated) == ([], [], [])


@pytest.mark.parametrize(("num_runs", "num_layers"), SHAPES)
def test_a_load_goes_up_once_a_segment_and_once_for_its_slots(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_runs: int, num_layers: int
) -> None:
    """Its runs go up once as well. The model's frequencies went up with an earlier load."""
    worker = worker_on(gpu, monkeypatch, num_layers)
    save(worker, 1)
    for is_first in (True, False):
        with counted(gpu) as seen:
            step(worker, loads=(load(num_runs),))
            copy(worker)
        assert len(seen.up) == (3 if is_first else 2)
        assert (seen.down, seen.waits, seen.pageable, seen.allocated) == ([], [], [], [])
        with counted(gpu) as seen:
            step(worker)
        assert len(seen.up) == 1
        assert (seen.down, seen.waits, seen.pageable, seen.allocated) == ([], [], [], [])
        assert loaded(worker).failed is False


@pytest.mark.parametrize(("num_runs", "num_layers"), SHAPES)
def test_a_choice_comes_down_once_for_each_result(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, num_runs: int, num_layers: int
) -> None:
    """What the tail attends to and what the probes changed. No step waits for it, however late it is."""
    worker = worker_on(gpu, monkeypatch, num_layers)
    device = worker.parts.placeholders._device
    save(worker, 1)
    step(worker, loads=(load(num_runs, chooses=True),))
    copy(worker)
    with counted(gpu) as seen:
        with monkeypatch.context() as late:
            late.setattr(device, "is_reached", lambda _: False)
            for _ in range(3):
                step(worker)
                assert not worker.take_transfers().finished_recving
        step(worker)
    assert loaded(worker).repaired
    assert len(seen.up) == 5  # two passes; listeners, and their blocks; slots of the probes
    assert len(seen.down) == 2
    assert (seen.waits, seen.pageable) == ([], [])


def test_a_choice_is_so_many_launches_a_layer(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many heads, tokens and probes there are: a launch costs as much as many megabytes."""
    launches = {}
    for num_layers in (2, 6):
        for chooses in (False, True):
            worker = worker_on(gpu, monkeypatch, num_layers)
            save(worker, 1)
            step(worker, loads=(load(10, chooses=chooses),))
            copy(worker)
            with counted(gpu) as seen:
                step(worker)
            launches[num_layers, chooses] = seen.launches
    of_layers = (launches[6, True] - launches[6, False]) - (launches[2, True] - launches[2, False])
    # Keys, queries, scale, products, mask, weights, two sums; rows of the probes read, values read again, and
    # written, which takes four here. Keys of 16 bits are three more, and a kernel writes with one.
    assert of_layers / 4 == 14


def loaded(worker: ConnectorWorker) -> Any:
    report = worker.build_connector_worker_meta()
    assert report is not None
    return report.loads["l"]
