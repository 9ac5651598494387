"""
What copies ask of CUDA, with streams and events that stand in for a GPU's: what waits for what, in which
stream, and which times are theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span
from tests.kvshare.vllm_connector.worker.fake_cuda import FakeEvent, FakeStream
from tests.kvshare.vllm_connector.worker.small_worker import BYTES_PER_TOKEN, NUM_TOKENS

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.cuda import CudaGpu
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

SEGMENT_BYTES = NUM_TOKENS * BYTES_PER_TOKEN
OF_LOADS = {"check": "write", "scatter": "write"}


@pytest.fixture
def vllm_stream() -> FakeStream:
    (stream := FakeStream()).at_ms = 70  # it is given its whole step in advance
    return stream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, vllm_stream: FakeStream) -> CudaGpu:
    """Its memory is the host's."""
    import torch

    from kvshare.vllm_connector.worker import cuda

    in_use = [vllm_stream]

    @contextmanager
    def using(stream: FakeStream) -> Iterator[None]:
        in_use.append(stream)
        yield
        in_use.pop()

    stood_in: dict[str, Any] = {"Stream": FakeStream, "Event": FakeEvent, "stream": using}
    stood_in |= {"device": lambda _: nullcontext(), "current_stream": lambda _: in_use[-1]}
    for name, value in stood_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda.CudaGpu, "_to_host", lambda _, numbers: numbers)  # pinned memory is CUDA's
    monkeypatch.setattr(FakeEvent, "now_ms", [0.0])
    made = cuda.CudaGpu(torch.device("cpu"))
    for name, own in streams(made).items():
        own.name = name
    return made


def streams(gpu: CudaGpu) -> dict[str, FakeStream]:
    return {stream.value: stood_in for stream, stood_in in dict[Any, Any](gpu._streams).items()}


def timed(gpu: CudaGpu, monkeypatch: pytest.MonkeyPatch, **ms: float) -> None:
    """Work of these names is noted in its stream and takes so long there."""
    for name, duration_ms in ms.items():
        own = streams(gpu)[{"up": "up", "down": "down", **OF_LOADS}.get(name, "gather")]
        work: Callable[..., Any] = getattr(gpu, name)

        def noted(
            *given: Any, name: str = name, own: FakeStream = own, work: Any = work, took: float = duration_ms
        ) -> Any:
            own.done.append(name)
            own.at_ms += took
            return work(*given)

        monkeypatch.setattr(gpu, name, noted)


@pytest.fixture
def worker(gpu: CudaGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectorWorker]:
    """With two staging buffers each way, for one segment each."""
    from kvshare.vllm_connector.worker import block_fences, device
    from tests.kvshare.vllm_connector.worker.small_worker import new_worker, one_rank

    timed(gpu, monkeypatch, up=3, check=1, scatter=1, gather=2, sums=1, down=5)
    monkeypatch.setattr(device, "STAGING_BYTES", 4 * SEGMENT_BYTES)
    with one_rank():
        made = new_worker(8)
        transfers = made.parts.transfers
        transfers._device = device.GpuDevice(gpu)
        transfers._fences = block_fences.BlockFences(transfers._device)
        yield made


def save(worker: ConnectorWorker, count: int, name: str = "s") -> None:
    from kvshare.vllm_connector.metadata import SaveRequest, StepMetadata
    from tests.kvshare.vllm_connector.worker.small_worker import late_copies

    spans = tuple((SegmentId(number), Span(0, NUM_TOKENS)) for number in range(1, count + 1))
    worker.save(StepMetadata(saves=(SaveRequest(name, (1, 2, 3), spans),)))
    late_copies(worker).run()


def load(worker: ConnectorWorker, count: int) -> None:
    from kvshare.vllm_connector.metadata import LoadRequest, StepMetadata
    from kvshare.vllm_protocol.messages import WireCopy
    from tests.kvshare.vllm_connector.worker.small_worker import late_copies

    part = NUM_TOKENS // count
    copies = tuple(WireCopy(SegmentId(n + 1), n * part, part, n * part, n * part) for n in range(count))
    request = LoadRequest("l", (4, 5, 6), 0, NUM_TOKENS, tuple(range(NUM_TOKENS)), copies)
    worker.begin(StepMetadata(loads=(request,)))
    late_copies(worker).run()


def finish(worker: ConnectorWorker) -> Any:
    """The GPU is past everything."""
    from kvshare.vllm_connector.metadata import StepMetadata

    FakeEvent.now_ms[0] = float("inf")
    worker.advance(StepMetadata())
    return worker.build_connector_worker_meta()


def test_a_save_reads_blocks_after_vllms_step(worker: ConnectorWorker, gpu: CudaGpu) -> None:
    """Bytes go down after their sums are made; the third batch waits until the first has left its buffer."""
    save(worker, 3)
    gather, down = (streams(gpu)[name].done for name in ("gather", "down"))
    assert gather[:3] == ["after vllm 0", "gather", "sums"]
    assert gather[3:] == ["gather", "sums", "after down 2", "gather", "sums"]
    assert down == ["after gather 3", "down", "after gather 5", "down", "after gather 8", "down"]


def test_a_load_goes_up_next_to_vllms_step_and_is_written_after_it(
    worker: ConnectorWorker, gpu: CudaGpu
) -> None:
    """Copies up, a layer each, wait for their buffers only. Sums are made before rows are written."""
    save(worker, 3)
    finish(worker)
    load(worker, 2)
    up, write = (streams(gpu)[name].done for name in ("up", "write"))
    assert up == ["up", "up", "after write 4", "up"]
    assert write[:5] == ["after up 1", "check", "after vllm 0", "scatter", "after up 2"]
    assert write[5:] == ["check", "scatter", "after up 4", "check", "scatter"]
    load(worker, 2)
    assert up[4:] == ["after write 7", "up", "after write 10", "up", "after write 14", "up"]


@pytest.mark.parametrize(("of_pass", "waits"), [(6, True), (7, False)])
def test_a_load_waits_for_a_pass_over_its_blocks(
    worker: ConnectorWorker, gpu: CudaGpu, vllm_stream: FakeStream, of_pass: int, waits: bool
) -> None:
    """For no other, and for no step of vLLM: vLLM gives it blocks that no step in flight uses."""
    save(worker, 1)
    finish(worker)
    FakeEvent.now_ms[0] = 0.0
    vllm_stream.at_ms = 500.0
    worker.parts.transfers.fence([of_pass])
    vllm_stream.at_ms = 1000.0  # vLLM's next step
    load(worker, 1)
    assert (500.0 if waits else 70.0) < streams(gpu)["write"].at_ms < (1000.0 if waits else 500.0)


def test_results_are_there_when_the_gpu_has_done_their_copies(worker: ConnectorWorker) -> None:
    """On vLLM's own stream, which is given its whole step in advance. Nobody uses them before."""
    import torch

    reading = worker.parts.transfers._device.read(torch.arange(3), torch.ones(2, 0))
    assert not reading.is_done
    assert reading.wait(0.001) is False
    with pytest.raises(AssertionError, match="when they have arrived"):
        reading.arrays()
    FakeEvent.now_ms[0] = 70.0
    assert reading.wait(60.0) is True
    assert [array.tolist() for array in reading.arrays()] == [[0, 1, 2], [[], []]]


def test_nothing_counts_before_the_gpu_is_past_it(worker: ConnectorWorker) -> None:
    """All is launched, and no step waits."""
    from kvshare.vllm_connector.metadata import StepMetadata

    save(worker, 1)
    worker.advance(StepMetadata())
    assert worker.take_transfers().finished_sending == set()
    report = finish(worker)
    assert report is not None
    assert worker.take_transfers().finished_sending == {"s"}
    assert not report.failed_saves


def test_a_gpu_is_given_few_batches_ahead(worker: ConnectorWorker, gpu: CudaGpu) -> None:
    """What comes next is decided when there is room: meanwhile the thread has nothing to do."""
    from kvshare.vllm_connector.metadata import SaveRequest, StepMetadata
    from tests.kvshare.vllm_connector.worker import small_worker

    spans = tuple((SegmentId(number), Span(0, 2)) for number in range(1, 30))
    lane = worker.parts.transfers._device._saves  # type: ignore[attr-defined]  # a GPU's
    lane.buffer_bytes = 2 * BYTES_PER_TOKEN
    worker.save(StepMetadata(saves=(SaveRequest("s", (1, 2, 3), spans),)))
    queue = small_worker.late_copies(worker)._queue
    for _ in range(40):
        queue.advance()
    assert streams(gpu)["down"].done.count("down") == 8
    FakeEvent.now_ms[0] = streams(gpu)["down"].at_ms
    queue.advance()
    assert streams(gpu)["down"].done.count("down") == 9


def test_who_preempts_waits_until_blocks_are_read_on_the_gpu(
    worker: ConnectorWorker, gpu: CudaGpu, vllm_stream: FakeStream
) -> None:
    """Not until the bytes have gone down, and vLLM's thread goes on at once."""
    from kvshare.vllm_connector.worker.copying import CopyThread

    save(worker, 2)
    transfers = worker.parts.transfers
    (under_way,) = transfers._under_way.values()
    CopyThread().wait_until_read(under_way.job)
    assert vllm_stream.done == ["after gather 4"]
    assert not under_way.job.is_done


def test_loads_and_saves_report_the_time_of_their_copies_only(worker: ConnectorWorker) -> None:
    """Not that of vLLM's step, of 70 ms, for which they wait: a bandwidth from it would be too low."""
    save(worker, 2)
    assert (report := finish(worker)) is not None
    assert report.stage_seconds["s"] == {"save": pytest.approx(0.002 + 2 * 0.005)}
    load(worker, 2)
    report = finish(worker)
    assert report is not None
    assert report.stage_seconds["l"] == {"verify": 0.0, "write": pytest.approx(3 * 0.003 + 0.001)}


def test_an_end_waits_for_copies_under_way(worker: ConnectorWorker) -> None:
    """Their memory is freed after it; the thread has launched them long before."""
    from kvshare.vllm_connector.worker.copying import CopyThread

    save(worker, 2)
    transfers = worker.parts.transfers
    transfers._copies = CopyThread()
    timer = threading.Timer(0.05, lambda: FakeEvent.now_ms.__setitem__(0, float("inf")))
    timer.start()
    worker.close()
    assert FakeEvent.now_ms == [float("inf")]
    timer.join()


def test_a_batch_that_fails_leaves_its_buffer_to_others(
    worker: ConnectorWorker, gpu: CudaGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load fails, and no other; blocks are not given back before what it had begun is over."""
    from kvshare.vllm_connector.metadata import StepMetadata

    save(worker, 2)
    finish(worker)
    FakeEvent.now_ms[0] = 0.0
    with monkeypatch.context() as patch:

        def stop(*_: object) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(gpu, "scatter", stop)
        load(worker, 2)
    worker.advance(StepMetadata())
    assert worker.take_transfers().finished_recving == set()
    report = finish(worker)
    assert report is not None
    assert report.loads["l"].failed
    load(worker, 2)
    report = finish(worker)
    assert report is not None
    assert not report.loads["l"].failed


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cuda_cannot_register_makes_copies_slow(
    gpu: CudaGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
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
        gpu.register(torch.empty(8))
    assert ("cannot register 32 bytes" in caplog.text) is bool(code)
    assert ("ulimit -l" in caplog.text) is bool(code)
    assert errors[-1] == 0
