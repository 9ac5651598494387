"""
Passes by piecewise CUDA graphs, as far as they can be tried without a GPU: real vLLM computes on the CPU, and
a stand-in for the captured graphs reads what a graph reads, at the addresses of its capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.test_choosing import scene

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.partial_forward import PartialForward
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

SIZES = (1, 2, 4, 8, 64, 320, 512)
NUM_ROWS = 2048
LIMIT = 1e-4  # log-probability, float32


class Captured:
    """vLLM's manager of graphs: each reads its inputs from the buffers, whatever it is given."""

    def __init__(self) -> None:
        import torch
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        self.buffers = InputBuffers(64, NUM_ROWS, torch.device("cpu"))
        self.buffers.input_ids.fill_(7)  # of vLLM's own last batch
        self.buffers.positions.fill_(9)
        self.read_from = self.buffers
        self.sizes: list[int] = []  # of the graphs that were run
        self.padding: list[int] = []

    @property
    def runner(self) -> Any:
        return SimpleNamespace(input_buffers=self.buffers, cudagraph_manager=self)

    def dispatch(self, num_reqs: int, num_tokens: int, uniform: int | None, num_loras: int) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        assert uniform is None, "runs are of any length"
        fitting = [size for size in SIZES if size >= num_tokens]
        mode = CUDAGraphMode.PIECEWISE if fitting else CUDAGraphMode.NONE
        return BatchExecutionDescriptor(mode, fitting[0] if fitting else num_tokens, None)

    def run_pw_graph(self, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context, size = get_forward_context(), len(inputs["input_ids"])
        assert size in SIZES
        assert context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        assert context.batch_descriptor is not None
        assert context.batch_descriptor.num_tokens == size
        assert context.is_padding is not None
        self.sizes.append(size)
        self.padding.append(int(context.is_padding.sum()))
        there = self.read_from
        model(**inputs | {"input_ids": there.input_ids[:size], "positions": there.positions[:size]})


@pytest.fixture
def captured() -> Captured:
    return Captured()


@pytest.fixture
def forward(vllm: Vllm, captured: Captured) -> Iterator[PartialForward]:
    """The passes of a vLLM, with graphs that are not tried yet."""
    from kvshare.vllm_connector.worker.graph_passes import GraphPasses

    forward = vllm.worker.attached.forward
    assert not forward.has_graphs
    assert not forward.uses_graphs
    forward._graphs = GraphPasses(captured.runner)
    yield forward
    forward._graphs, forward.uses_graphs = None, False


def warnings(vllm: Vllm, forward: PartialForward) -> tuple[str, ...]:
    from kvshare.vllm_connector.worker.self_test import SelfTest

    self_test = SelfTest(vllm.worker.attached.cache, forward, vocab_size=300, max_model_len=1024)
    return vllm.worker._start._check_graphs(self_test, forward)


def test_the_self_test_tries_them(vllm: Vllm, forward: PartialForward, captured: Captured) -> None:
    assert warnings(vllm, forward) == ()
    assert forward.uses_graphs
    assert captured.sizes == [512, 1, 320]
    assert captured.padding == [size - rows for size, rows in zip(captured.sizes, (322, 1, 297), strict=True)]


def other_ids(captured: Captured) -> None:
    """The graphs read buffers that nobody fills: rows of another batch, in silence."""
    captured.read_from = Captured().buffers


def other_positions(captured: Captured) -> None:
    captured.read_from = SimpleNamespace(
        input_ids=captured.buffers.input_ids, positions=captured.buffers.positions.clone()
    )


def failing(captured: Captured) -> None:
    def run(*_: object) -> None:
        raise RuntimeError("no such graph")

    vars(captured)["run_pw_graph"] = run


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (other_ids, "they do not give the KV"),
        (other_positions, "they do not give the KV"),
        (failing, "raised an error: RuntimeError: no such graph"),
    ],
)
def test_graphs_that_read_something_else_are_not_used(
    vllm: Vllm,
    forward: PartialForward,
    captured: Captured,
    spoil: Callable[[Captured], None],
    reason: str,
) -> None:
    spoil(captured)
    (warning,) = warnings(vllm, forward)
    assert reason in warning
    assert not forward.uses_graphs


def test_vllms_batch_stays_in_its_buffers(vllm: Vllm, forward: PartialForward, captured: Captured) -> None:
    """Loads that join a step are computed when vLLM has filled them, and before it reads them."""
    assert warnings(vllm, forward) == ()
    assert (captured.buffers.input_ids == 7).all()
    assert (captured.buffers.positions == 9).all()
    assert not captured.buffers.is_padding.any()


def test_answers_are_those_of_full_prefill(
    vllm: Vllm, forward: PartialForward, captured: Captured, text: Texts, copies: Copies
) -> None:
    forward.uses_graphs = True
    tokens = text(600, 41)
    donor = vllm.store(tokens)
    answer, event = vllm.shared(tokens, copies(donor, (0, 100), (130, 300), (301, 500), (520, 590)))
    assert event.decision == "approx"
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert captured.sizes == [64]


def test_attention_is_watched_in_the_rows_of_the_pass(
    vllm: Vllm, forward: PartialForward, captured: Captured, text: Texts, copies: Copies
) -> None:
    """What is chosen to be repaired does not depend on the padding."""
    tokens = text(600, 42)
    moved = scene(vllm.store(tokens), tokens, text, copies)
    answers = []
    for forward.uses_graphs in (False, True):
        answers.append(moved.ask(vllm))
    (without, event), (answer, same) = answers
    assert captured.sizes
    assert answer.distance(without) <= LIMIT
    assert (event.decision, same.decision) == ("approx", "approx")
    assert same.repaired == event.repaired
