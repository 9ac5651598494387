"""Whatever breaks off in sharing, the answer is the plain one, and what is retained is right."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.starts import ASYNC

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadRequest
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
WORKER = "kvshare.vllm_connector.worker"
STAGES = [
    f"{WORKER}.{stage}"
    for stage in (
        "copies_in_turn.row_copies",
        "block_copies.copy_by_torch",
        "placeholders.Placeholders._compute",
    )
]


def fail(*_: object) -> None:
    raise RuntimeError("out of memory, say")


@ASYNC
@pytest.mark.parametrize("stage", STAGES)
def test_a_load_that_breaks_off_with_a_step_in_flight(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The next step is scheduled before vLLM hears of it, and without this request: nothing is lost."""
    tokens = text(600, 5)
    donor = vllm.store(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(stage, fail)
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED), max_tokens=8)
    assert answer.distance(vllm.plain(tokens, max_tokens=8)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "load_failed", ())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_load_that_breaks_off(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, stage: str, max_tokens: int
) -> None:
    """
    vLLM computes it in full, and it is kept; a request in the same step that shares nothing is not touched.
    """
    tokens, other = text(600, 5), text(500, 6)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    with monkeypatch.context() as patch:
        patch.setattr(stage, fail)
        answers = vllm.ask(
            (tokens, ticket, private_salt(ticket.ticket_id)),
            (other, None, vllm.fresh()),
            max_tokens=max_tokens,
        )
    event = vllm.finished(ticket)
    assert answers[0].distance(vllm.plain(tokens, max_tokens=max_tokens)) <= LIMIT
    assert answers[1].distance(vllm.plain(other, max_tokens=max_tokens)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "load_failed", ())
    assert sum(segment.length for segment in event.stored) == 600 + max_tokens - 1
    again, event = vllm.shared(tokens, copies(event, *SCATTERED))
    assert again.distance(vllm.plain(tokens)) <= LIMIT
    assert event.decision == "approx"


def test_a_save_that_breaks_off(vllm: Vllm, text: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is out already; nothing is kept, nothing is left over."""
    tokens, held = text(600, 7), len(vllm.side.segments)
    with monkeypatch.context() as patch:
        patch.setattr("kvshare.vllm_connector.worker.host_copies.HostSave._copy", fail)
        event = vllm.store(tokens)
    assert (event.reason, event.stored, event.used) == ("save_failed", (), ())
    vllm.ask((text(50), None, None))  # the next step carries the drops
    assert len(vllm.side.segments) == held


@pytest.mark.parametrize(
    "method",
    ["on_new_request", "get_num_new_matched_tokens", "saving.save_ended", "saving.note_prompt_saved"],
)
def test_an_error_of_ours_is_not_in_the_way(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The scheduler side breaks in one of its doors: the answer is the plain one."""
    tokens = text(600, 15)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    with monkeypatch.context() as patch:
        *owners, name = method.split(".")
        patch.setattr(functools.reduce(getattr, owners, vllm.side.scheduler), name, fail)
        (answer,) = vllm.ask((tokens, ticket, private_salt(ticket.ticket_id)))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT


def load(tokens: list[int]) -> LoadRequest:
    """A request without copies."""
    from kvshare.vllm_connector.metadata import LoadRequest

    return LoadRequest("r", (1, 2, 3, 4, 5), 0, 590, tuple(tokens[:590]), ())


def test_step_metadata_does_not_show_the_prompt(text: Texts) -> None:
    """vLLM writes a step's metadata into its log when the step fails."""
    from kvshare.vllm_connector.metadata import StepMetadata

    tokens = text(600, 5)
    assert f"{tokens[0]}, {tokens[1]}" not in repr(StepMetadata(loads=(load(tokens),)))
