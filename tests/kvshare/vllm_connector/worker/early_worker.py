"""A worker on a GPU that makes copies when the test says, a load of its, and what its pass has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import (
    DIM,
    HEADS,
    NUM_TOKENS,
    late_copies,
    new_worker,
    use,
)

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadRequest, LoadResult
    from kvshare.vllm_connector.worker.runs import Run

LAYERS = 6  # each of them fills a staging buffer
VALUE = 7.0
BLOCKS = (4, 5, 6)
COPIED = [*range(5), *range(7, 16)]
COPIES = (WireCopy(SegmentId(1), 0, 5, 0, 0), WireCopy(SegmentId(1), 7, 9, 7, 7))


class Kernels:
    """An attention implementation, whose class has `forward`."""

    def __init__(self, update: Callable[..., None], own: Callable[[], None]) -> None:
        self.do_kv_cache_update, self._own = update, own

    def forward(self, _: object, query: object, *, output: object) -> None:
        self._own()


class Early:
    """
    A worker that has one segment stored, a load of it, and what its pass has read.

    `fails_at`: the layer in which a pass raises an error. If it `chooses`, repairs are chosen by what its
    first pass attends to, which are zeros.
    """

    def __init__(self, *, chooses: bool = False) -> None:
        from kvshare.sharing.plan import RepairOrder
        from kvshare.vllm_connector.metadata import LoadRequest
        from kvshare.vllm_connector.worker.reports import Reports
        from kvshare.vllm_connector.worker.start import Attached
        from tests.kvshare.vllm_connector.worker.deferred_gpu import deferred_device

        self.worker = new_worker(4, shapes=((HEADS, DIM),) * LAYERS)
        self.cache = self.worker.attached.cache
        device, self.gpu = deferred_device(HEADS * 2 * DIM * 4 * NUM_TOKENS)
        self.worker._start = replace(self.worker._start, device=device)
        self.worker._reports = Reports(device)
        self.read: list[tuple[int, bool]] = []  # layers in the order of the pass, and whether all was there
        self.fails_at: int | None = None
        attached = Attached(self.cache, self._forward(), self.worker.attached.store)
        use(self.worker, attached, can_listen=chooses)
        self.worker.parts.placeholders._step_tokens = self.worker.parts.early._step_tokens = 100
        self.is_due = True
        self.worker._reports.paces.are_in_time = lambda *_, **__: self.is_due  # type: ignore[method-assign]
        self.copies, tokens = late_copies(self.worker), tuple(range(NUM_TOKENS))
        self.load: LoadRequest = LoadRequest("l", BLOCKS, 0, NUM_TOKENS, tokens, COPIES)
        if chooses:
            self.load = replace(self.load, order=RepairOrder((Span(0, 5), Span(7, 16)), (1,), 2))
        self.save()

    def _forward(self) -> Any:
        import torch

        from kvshare.vllm_connector.worker.gpu import Stream
        from kvshare.vllm_connector.worker.partial_forward import PartialForward

        early = self

        class Layers(PartialForward):
            """Its layers are computed by the GPU, in its time. It may stop, and hears nothing."""

            may_stop = True

            def __init__(self) -> None:
                self._cache, self.max_tokens, self._max_runs = early.cache, 100, 100

            def _forward(self, runs: Sequence[Run]) -> None:
                rows = torch.zeros(100, 1, 1)
                for layer in self._cache.layers.values():
                    layer.impl.forward(layer, rows, output=rows)

            def observe(self, *_: object) -> None:
                """The weights of all slots stay 0."""

        def attention(index: int) -> Callable[[], None]:
            def attend() -> None:
                if index == self.fails_at:
                    raise RuntimeError("out of memory")
                self.gpu.ask(Stream.VLLM, lambda: self.read.append((index, self.is_there(index))))

            return attend

        for index, layer in enumerate(self.cache.layers.values()):
            layer.impl = Kernels(layer.impl.do_kv_cache_update, attention(index))
        return Layers()

    def save(self) -> None:
        import torch

        from kvshare.vllm_connector.metadata import SaveRequest

        rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), VALUE)
        self.cache.write(rows, -rows, self.cache.slots((1, 2, 3), Span(0, NUM_TOKENS)))
        self.step(saves=(SaveRequest("s", (1, 2, 3), ((SegmentId(1), Span(0, NUM_TOKENS)),)),))
        self.copies.run()
        self.gpu.run()
        self.step()
        assert SegmentId(1) in self.worker.attached.store

    def is_there(self, layer: int) -> bool:
        keys = self.cache.read(BLOCKS, Span(0, NUM_TOKENS)).k
        return [p for p in range(NUM_TOKENS) if (keys[layer, p] == VALUE).all()] == COPIED

    def begin(self, num_batches: int) -> None:
        """The load is launched, so many layers of it are there, and its pass begins."""
        from kvshare.vllm_connector.worker.gpu import Stream

        self.step(loads=(self.load,))
        self.copies.run()
        self.gpu.run(Stream.VLLM, Stream.UP)
        for _ in range(num_batches):
            self.gpu.run(Stream.WRITE, marks=3)  # written from, to, and the end of the batch
            self.gpu.run(Stream.UP)
        self.step(has_forward=False)

    def step(self, **own: Any) -> dict[str, LoadResult]:
        """What it reports of loads. `self.stages` are those that it reports."""
        import torch

        from kvshare.vllm_connector.metadata import StepMetadata

        made = StepMetadata(**own)
        with torch.inference_mode():
            self.worker.begin(made)
            self.worker.advance(made)
            self.worker.save(made)
        report, transfers = self.worker.build_connector_worker_meta(), self.worker.take_transfers()
        results = {} if report is None else dict(report.loads)
        assert transfers.failed_recving == {name for name, result in results.items() if result.failed}
        self.stages = {} if report is None else report.stage_seconds.get("l", {})
        return results
