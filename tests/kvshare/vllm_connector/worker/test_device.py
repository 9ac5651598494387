"""
What copies ask of CUDA, with streams and events that stand in for a GPU's: after which mark, through how much
staging, in how many copies, and that nobody goes on before they are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.device import CudaDevice
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

HEADS, LAYERS, DIM = 2, 3, 4
SEGMENT_BYTES = HEADS * LAYERS * 2 * 16 * DIM * 4  # of 16 tokens


class Stream:
    """`done`: what happened in it, in order. `at_ms`: when it will be past all that it was given."""

    def __init__(self, _: object = None) -> None:
        self.done: list[str] = []
        self.at_ms = 0.0

    def wait_event(self, event: Event) -> None:
        self.done.append(f"after {event.name}")
        self.at_ms = max(self.at_ms, event.at_ms)

    def synchronize(self) -> None:
        self.done.append("synchronised")


class Event:
    name = "a mark that was never set"
    now_ms = 0.0  # how far the GPU is

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        self.name, self.at_ms = f"a mark of {stream.at_ms:.0f} ms", stream.at_ms

    def query(self) -> bool:
        return self.at_ms <= self.now_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """Its memory is the host's, and its staging holds two segments of 16 tokens and a bit."""
    import torch

    from kvshare.vllm_connector.worker import device

    vllm_stream = Stream()
    vllm_stream.at_ms = 70  # it is given its whole step in advance
    in_use = [vllm_stream]

    @contextmanager
    def using(stream: Stream) -> Iterator[None]:
        stream.done.append("used")
        in_use.append(stream)
        yield
        in_use.pop()

    stood_in = {"Stream": Stream, "Event": Event, "stream": using, "device": lambda _: nullcontext()}
    for name, value in {**stood_in, "current_stream": lambda _: in_use[-1]}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device, "STAGING_BYTES", 2 * SEGMENT_BYTES + 100)
    return device.CudaDevice(torch.device("cpu"))


def segments(count: int, num_tokens: int = 16) -> list[torch.Tensor]:
    import torch

    return [torch.randn(HEADS, LAYERS, 2, num_tokens, DIM) for _ in range(count)]


def test_work_comes_after_its_mark_and_is_over_at_the_end(device: CudaDevice) -> None:
    def stop() -> None:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        device.run_after(device.mark(), stop)
    assert isinstance(device._stream, Stream)
    assert device._stream.done == ["used", "after a mark of 70 ms", "synchronised"]


def test_results_are_there_when_the_gpu_has_come_to_the_end_of_their_copies(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On vLLM's own stream, which is given its whole step in advance. Nobody uses them before."""
    import torch

    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, *, dtype, pin_memory: empty(shape, dtype=dtype))
        reading = device.read(torch.arange(3), torch.ones(2, 0))
    assert not reading.is_done
    assert reading.wait(0.001) is False
    with pytest.raises(AssertionError, match="when they have arrived"):
        reading.arrays()
    monkeypatch.setattr(Event, "now_ms", 70.0)
    assert reading.wait(60.0) is True
    assert [array.tolist() for array in reading.arrays()] == [[0, 1, 2], [[], []]]


def test_the_rest_of_vllms_step_is_no_time_of_the_copies(device: CudaDevice) -> None:
    """They wait 70 ms for it. A bandwidth that is learned from that would be too low."""
    stream: Any = device._stream

    def copy() -> None:
        stream.at_ms += 4

    assert device.run_after(device.mark(), copy) == pytest.approx(0.004)
    assert device.run_after(device.mark(), copy) == pytest.approx(0.004)


def test_loads_and_saves_report_the_time_of_their_copies_only(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the thread that copies waits for: its own clock stands still here."""
    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata
    from kvshare.vllm_connector.worker import copying
    from kvshare.vllm_protocol.messages import WireCopy
    from tests.kvshare.vllm_connector.worker.small_worker import NUM_TOKENS, late_copies, new_worker, one_rank

    monkeypatch.setattr(copying, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    stream: Any = device._stream
    copy_to_device, copy_to_host = device.to_device, device.to_host

    def to_device(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        stream.at_ms += 3
        return copy_to_device(rows)

    def to_host(staged: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        stream.at_ms += 5
        copy_to_host(staged, rows)

    monkeypatch.setattr(device, "to_device", to_device)
    monkeypatch.setattr(device, "to_host", to_host)
    worker, span = new_worker(2), Span(0, NUM_TOKENS)
    worker.parts.transfers._device = device
    with one_rank():
        worker.save(StepMetadata(saves=(SaveRequest("s", (1, 2, 3), ((SegmentId(1), span),)),)))
        late_copies(worker).run()
        copies = (WireCopy(SegmentId(1), 0, NUM_TOKENS, 0, 0),)
        worker.begin(
            StepMetadata(
                loads=(LoadRequest("l", (4, 5, 6), 0, NUM_TOKENS, tuple(range(NUM_TOKENS)), copies),)
            )
        )
        late_copies(worker).run()
        worker.advance(StepMetadata())
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert report.stage_seconds["s"] == {"save": pytest.approx(0.005)}
    assert report.stage_seconds["l"] == {"verify": 0.0, "write": pytest.approx(0.003)}


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [1]), (2, [2]), (5, [2, 2, 1])])
def test_batches_fit_the_staging(device: CudaDevice, count: int, expected: list[int]) -> None:
    from kvshare.vllm_connector.worker.device import batches

    rows = segments(count)
    found = [rows[batch] for batch in batches(rows)]
    assert [len(batch) for batch in found] == expected
    assert [id(each) for batch in found for each in batch] == [id(each) for each in rows]


def test_a_segment_larger_than_the_staging_has_a_batch_and_memory_of_its_own(device: CudaDevice) -> None:
    import torch

    from kvshare.vllm_connector.worker.device import batches

    small, large = segments(1)[0], segments(1, num_tokens=64)[0]
    assert [batch.stop - batch.start for batch in batches([small, large, small])] == [1, 1, 1]
    (staged,) = device.to_device([large])
    assert torch.equal(staged, large)
    assert staged.untyped_storage().data_ptr() != device._staging.untyped_storage().data_ptr()


def small_cache() -> PagedCache:
    """Of nine blocks of 8 tokens."""
    import torch

    from kvshare.kv.movement import STAYS
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

    def update(_: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // 8, :, slots % 8] = torch.cat([k, v], dim=-1)

    impl = SimpleNamespace(do_kv_cache_update=update)
    shape = (9, HEADS, 8, 2 * DIM)
    layers = {str(n): SimpleNamespace(kv_cache=torch.zeros(shape), impl=impl) for n in range(LAYERS)}
    cache = PagedCache(layers, block_size=8)
    assert cache.find_layout(0) is None
    cache.kv_layout = cache.kv_layout.moving([(STAYS, STAYS)] * LAYERS)
    return cache


@contextmanager
def counted_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each copy of a tensor did not block."""
    import torch

    copied: list[bool] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append(non_blocking)
        return copy(target, source, non_blocking)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", counted)
        yield copied


def test_a_segment_is_copied_once_however_many_layers_and_pieces_it_has(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the device and back. Many pieces of a segment are written next to each other in a batch."""
    import torch

    from kvshare.vllm_connector.worker.copy_writer import RowCopy, write_copies
    from kvshare.vllm_connector.worker.device import batches

    cache, stored, block_ids = small_cache(), segments(3), (5, 2, 7, 1, 8, 3)
    pieces = []
    for number, rows in enumerate(stored):
        for start in range(0, 16, 4):  # four pieces
            slots = cache.slot_numbers(block_ids, Span(16 * number + start, 16 * number + start + 4))
            pieces.append(RowCopy(rows, Span(start, start + 4), 0, slots))
    with counted_copies(monkeypatch) as copied:
        write_copies(cache, device, pieces)
    assert copied == [True] * 3

    spans, back = [Span(16 * n, 16 * (n + 1)) for n in range(3)], [torch.empty_like(rows) for rows in stored]
    with counted_copies(monkeypatch) as copied:
        for batch in batches(back):
            staged = device.room_for(back[batch])
            assert sum(each.nbytes for each in staged) <= device._staging.nbytes
            cache.gather(block_ids, spans[batch], staged)
            device.to_host(staged, back[batch])
    assert copied == [True] * 3
    assert all(map(torch.equal, back, stored))


def test_inputs_of_a_pass_are_one_copy() -> None:
    import numpy as np
    import torch

    from kvshare.kv.to_device import to_device

    arrays = (np.arange(5, dtype=np.int32), np.arange(7), np.arange(12, dtype=np.int32).reshape(3, 4))
    there = to_device(torch.device("cpu"), *arrays)
    assert [each.dtype for each in there] == [torch.int32, torch.int64, torch.int32]
    assert all(np.array_equal(each.numpy(), array) for each, array in zip(there, arrays, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in there}) == 1
    assert all(each.data_ptr() % 16 == 0 for each in there)


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cuda_cannot_register_makes_copies_slow(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """They are made all the same, the operator reads what to do, and no later launch raises the error."""
    import torch
    from vllm.v1.kv_offload.cpu import host_register

    errors = [0]
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: errors.append(code) or code,  # type: ignore[func-returns-value]
        cudaGetLastError=errors.pop,
    )
    for name in ("CudaRTLibrary", "_get_cudart"):  # since vLLM 0.33 the second keeps one of the first
        monkeypatch.setattr(host_register, name, lambda: runtime, raising=False)
    monkeypatch.setattr(
        host_register, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False)
    )
    with caplog.at_level("WARNING", logger="vllm.kvshare"):
        device.register(torch.empty(8))
    assert ("cannot register 32 bytes" in caplog.text) is bool(code)
    assert ("ulimit -l" in caplog.text) is bool(code)
    assert errors[-1] == 0
