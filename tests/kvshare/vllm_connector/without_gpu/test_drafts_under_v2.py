"""
A head that drafts, under vLLM's model runner V2: its driver of connectors asks what is done, and lets saves
begin, after the drafts of a step. The head is one that fits its model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.kvshare.vllm_connector.test_heads import full, tokens_a_step, write
from tests.kvshare.vllm_connector.without_gpu.test_model_runner_v2 import Driven

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Copies, Start, Texts

pytestmark = pytest.mark.long

LIMIT = 1e-4  # log-probability, float32
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
ENOUGH, LEAST = 1.8, 0.97  # tokens a step of a full prefill; of them, of a shared one


@pytest.fixture(scope="module", params=["mtp", "eagle"])
def driven(
    request: pytest.FixtureRequest,
    start: Start,
    checkpoint: Checkpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Driven]:
    folder = tmp_path_factory.mktemp("v2") / request.param
    write(request.param, checkpoint("llama"), folder)
    drafts = {"num_speculative_tokens": 3, "method": request.param}
    if request.param != "mtp":
        drafts["model"] = str(folder / "head")
    vllm = start(folder / "model", speculative_config=drafts)
    with pytest.MonkeyPatch.context() as patch:
        yield Driven(vllm, patch, full_graph=False, defers=False)


def test_drafts_are_accepted_as_after_a_full_prefill(driven: Driven, text: Texts, copies: Copies) -> None:
    """From vLLM's blocks, and from host memory."""
    vllm, tokens = driven.vllm, text(600, 301)
    donor = vllm.store(tokens)
    expected = tokens_a_step(full(vllm, tokens))
    assert expected >= ENOUGH
    plain = vllm.plain(tokens, max_tokens=40)
    for _ in range(2):
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED), max_tokens=40)
        assert event.decision == "approx"
        assert answer.distance(plain) <= LIMIT
        assert tokens_a_step(event) >= LEAST * expected
        vllm.forget_blocks()


def test_a_step_drafts_before_its_saves_begin(driven: Driven, text: Texts) -> None:
    vllm, step = driven.vllm, driven.steps
    drafter = vllm.core.model_executor.driver_worker.model_runner.drafter
    propose = drafter.propose

    def noted(*given: object, **named: object) -> object:
        step[-1].append("draft")
        return propose(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", noted)
        vllm.store(text(600, 302))
    drafted = [each for each in step if "draft" in each]
    assert drafted
    for each in drafted:
        assert each.index("forward") < each.index("draft") < each.index("wait_for_save")
