"""
The connector under vLLM's model runner V2, which GPUs have by default: its driver of connectors, at the
places where V2 calls it, carries out the steps of a vLLM whose model runs under V1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvshare.vllm_protocol.messages import FinishedReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from kvshare.vllm_connector.metadata import StepMetadata
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4  # log-probability, float32
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))

Step = list[str]  # what happened, in order
BEHIND = ["start_load_kv", "wait_for_save", "get_transfer_results", "build_connector_worker_meta"]
WITH_A_DRAFTER = [BEHIND[0], *BEHIND[2:], BEHIND[1]]  # its pass comes before saves, since vLLM 0.33
OURS = ("bind_connector_metadata", *BEHIND)


class Driven:
    """
    V1's model runner with V2's `ActiveKVConnector`; `full_graph`: as before a graph of the whole model;
    `defers`: as with a drafter.
    """

    def __init__(self, vllm: Vllm, patch: pytest.MonkeyPatch, *, full_graph: bool, defers: bool) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        config = vllm.core.vllm_config
        layers = config.compilation_config.static_forward_context
        self.vllm = vllm
        self.steps: list[Step] = []
        self.metadata: list[StepMetadata] = []  # of each step
        self.outputs: list[KVConnectorOutput] = []  # what each step reported
        self._full_graph = full_graph
        self.defers = defers
        self._driver = ActiveKVConnector(config, {name: layer.kv_cache for name, layer in layers.items()})
        self._pending: tuple[KVConnectorOutput, set[str]] | None = None
        patch.setattr(KVConnectorModelRunnerMixin, "maybe_get_kv_connector_output", self._around_forward)
        patch.setattr(KVConnectorModelRunnerMixin, "kv_connector_no_forward", self._no_forward)
        patch.setattr(KVConnectorModelRunnerMixin, "finalize_kv_connector", lambda *_: None)  # V1's
        forward, sample = GPUModelRunner._model_forward, GPUModelRunner.sample_tokens

        def noted_forward(*arguments: Any, **options: Any) -> Any:
            self.steps[-1].append("forward")
            return forward(*arguments, **options)

        def sample_and_report(*arguments: Any) -> Any:
            result = sample(*arguments)
            self._report()
            return result

        patch.setattr(GPUModelRunner, "_model_forward", noted_forward)
        patch.setattr(GPUModelRunner, "sample_tokens", sample_and_report)
        for name in OURS:
            patch.setattr(type(get_kv_transfer_group()), name, self._noted(name))

    def _noted(self, name: str) -> Callable[..., Any]:
        from kvshare.vllm_connector.connector import KVShareConnector

        method = getattr(KVShareConnector, name)

        def act(*arguments: Any, **options: Any) -> Any:
            self.steps[-1].append(name)
            return method(*arguments, **options)

        return act

    def _begin(self, scheduled: SchedulerOutput) -> None:
        self.steps.append([])
        self.metadata.append(scheduled.kv_connector_metadata)

    @contextmanager
    def _around_forward(
        self, scheduled: SchedulerOutput, defer_finalize: bool = False
    ) -> Iterator[KVConnectorOutput]:
        from vllm.forward_context import override_forward_context
        from vllm.v1.outputs import KVConnectorOutput

        self._begin(scheduled)
        requests = list(scheduled.num_scheduled_tokens)
        batch = SimpleNamespace(
            idx_mapping=range(len(requests)),
            req_ids=requests,
            num_tokens=scheduled.total_num_scheduled_tokens,
        )
        with override_forward_context(None) if self._full_graph else nullcontext():
            self._driver.pre_forward(scheduled, batch, attn_metadata={} if self._full_graph else None)
        output = KVConnectorOutput()
        yield output
        self._driver.finish_forward()
        self._pending = output, scheduled.finished_req_ids

    def _report(self) -> None:
        """V2 asks once tokens are sampled, V1 before that."""
        if self._pending is not None:
            (output, finished_req_ids), self._pending = self._pending, None
            options = {"defer_finalize": True} if self.defers else {}
            vars(output).update(vars(self._driver.post_forward(finished_req_ids, **options)))
            if self.defers:
                self._driver.finalize_step()
            self.outputs.append(output)

    def _no_forward(self, scheduled: SchedulerOutput, _: object) -> ModelRunnerOutput:
        from vllm.v1.outputs import KVConnectorOutput

        self._begin(scheduled)
        result = self._driver.no_forward(scheduled)
        self.outputs.append(result.kv_connector_output or KVConnectorOutput())  # None: nothing to report
        return result


@pytest.fixture(params=["in a forward context", "before a full graph", "with a drafter"])
def driven(vllm: Vllm, request: pytest.FixtureRequest) -> Iterator[Driven]:
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    full_graph, defers = (request.param == name for name in ("before a full graph", "with a drafter"))
    if defers and not hasattr(ActiveKVConnector, "finalize_step"):
        pytest.skip("this vLLM saves before the drafter's pass")
    with pytest.MonkeyPatch.context() as patch:
        yield Driven(vllm, patch, full_graph=full_graph, defers=defers)


def share(driven: Driven, text: Texts, copies: Copies, seed: int) -> FinishedReport:
    """A donor and a prompt that reuses it, which is answered as without."""
    vllm, tokens = driven.vllm, text(600, seed)
    donor = vllm.store(tokens)
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    return event


def test_answers_are_those_of_full_prefill(driven: Driven, text: Texts, copies: Copies) -> None:
    event = share(driven, text, copies, 201)
    assert (event.decision, event.used, event.num_computed) == ("approx", (0, 1, 2, 3, 4), 61)


def test_each_step_calls_the_connector_in_its_order(driven: Driven, text: Texts, copies: Copies) -> None:
    """Copies begin before the forward pass; passes and saves come behind it, and what is done is reported."""
    share(driven, text, copies, 202)
    kinds = set()
    for step, metadata in zip(driven.steps, driven.metadata, strict=True):
        has_forward = "forward" in step
        assert metadata.has_forward is has_forward
        kinds.add((bool(metadata.loads), has_forward))
        behind = WITH_A_DRAFTER if driven.defers and has_forward else BEHIND
        assert step == ["bind_connector_metadata"] + ["forward"] * has_forward + behind
    assert kinds >= {(True, False), (False, True), (False, False)}


def test_what_is_saved_is_reported_once_and_later(driven: Driven, text: Texts) -> None:
    """Prompts behind their prefill; answers in a step without a forward, as nobody else is there."""
    donor = driven.vllm.store(text(600, 203))
    prompt, answer = (place for place, metadata in enumerate(driven.metadata) if metadata.saves)
    reports = [output.kv_connector_worker_meta for output in driven.outputs]
    (of_prompt,) = [n for n, report in enumerate(reports) if report is not None and report.saved_prompts]
    (of_answer,) = [n for n, output in enumerate(driven.outputs) if output.finished_sending]
    assert prompt < of_prompt
    assert answer < of_answer
    assert "forward" not in driven.steps[answer]
    assert sum(segment.length for segment in donor.stored) == 603


def test_a_load_that_fails_is_computed_by_vllm(
    driven: Driven, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported as loaded, and as failed, in one step."""
    vllm, tokens = driven.vllm, text(600, 204)
    donor = vllm.store(tokens)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvshare.vllm_connector.worker.partial_forward.PartialForward.compute", fail)
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason) == ("full", "load_failed")
    (failed,) = [output for output in driven.outputs if output.failed_recving]
    assert failed.failed_recving == failed.finished_recving
    assert not any(output.invalid_block_ids for output in driven.outputs)
