"""A prompt is saved once it is prefilled: others copy from it while its answer is still generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvshare.vllm_protocol.messages import Prefilled, Ticket
from tests.kvshare.vllm_connector.starts import ASYNC, USUAL

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
LONG = 40  # tokens of an answer that runs on


def begin(vllm: Vllm, tokens: list[int], ticket: Ticket, *, salt: str | None = None) -> str:
    return vllm.begin(tokens, ticket, salt=salt or vllm.fresh("tenant"), max_tokens=LONG)


def step_until_prefilled(vllm: Vllm, ticket: Ticket) -> Prefilled:
    """Its answer is not over by then."""
    for _ in range(LONG // 2):
        vllm.llm.llm_engine.step()
        if (event := vllm.prefilled(ticket)) is not None:
            assert vllm.scheduler.has_unfinished_requests()
            return event
    raise AssertionError("the prompt was not saved")


def finish(vllm: Vllm) -> None:
    """Answers to their ends, in vLLM's front end too, and all is saved."""
    while vllm.llm.llm_engine.has_unfinished_requests():
        vllm.llm.llm_engine.step()
    vllm.settle()


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=USUAL), pytest.param(True, marks=ASYNC)])
def test_others_copy_from_it_while_it_runs(
    vllm: Vllm, text: Texts, copies: Copies, *, is_async: bool
) -> None:
    """What they copy is what a whole prefill gives; the answer's KV comes behind it."""
    assert vllm.side.info().settings["async_scheduling"] == is_async
    tokens, other = text(400, 1), text(400, 1)[:300] + text(90, 2)
    ticket = vllm.ticket(tokens)
    begin(vllm, tokens, ticket)
    donor = step_until_prefilled(vllm, ticket)
    assert sum(segment.length for segment in donor.stored) == 400
    planned = vllm.ticket(other, copies(donor, (0, 300)), exact_length=300)
    answer, _ = vllm.ask((other, planned, vllm.fresh("tenant")))  # and that of the first
    assert answer.distance(vllm.plain(other)) <= LIMIT
    assert vllm.finished(planned).num_computed == 90
    finished = vllm.finished(ticket)
    assert finished.stored[: len(donor.stored)] == donor.stored
    assert sum(segment.length for segment in finished.stored) == 400 + LONG - 1
    assert len(finished.output_ids) == LONG - 1


def test_a_planned_one_is_a_donor_too(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Once it is reported what its load did; copies are not saved again."""
    from kvshare.vllm_protocol.salts import private_salt

    tokens = text(400, 3)
    first = vllm.store(tokens)
    edited = [*tokens[:100], *text(20, 4), *tokens[120:]]
    ticket = vllm.ticket(edited, copies(first, (0, 100), (120, 350)))
    begin(vllm, edited, ticket, salt=private_salt(ticket.ticket_id))
    event = step_until_prefilled(vllm, ticket)
    assert event.used == tuple(range(len(ticket.copies)))
    assert [(s.start, s.length) for s in event.stored] == [(100, 20), (350, 50)]
    finish(vllm)
    assert vllm.finished(ticket).used == event.used


def test_one_that_is_aborted_leaves_its_prompt(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """With as much of its answer as there was."""
    tokens = text(400, 5)
    ticket = vllm.ticket(tokens)
    request_id = begin(vllm, tokens, ticket)
    donor = step_until_prefilled(vllm, ticket)
    vllm.llm.llm_engine.abort_request([request_id])
    finish(vllm)
    event = vllm.finished(ticket)
    assert event.stored[: len(donor.stored)] == donor.stored
    assert sum(segment.length for segment in event.stored) == 400 + len(event.output_ids)
    copied = vllm.ticket(tokens, copies(event, (0, 399)), exact_length=399)
    (answer,) = vllm.ask((tokens, copied, vllm.fresh("tenant")))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT


def test_one_that_is_preempted_is_not_saved_twice(vllm: Vllm, text: Texts) -> None:
    """It comes back, and its answer is added to what was saved."""
    tokens = text(400, 6)
    ticket = vllm.ticket(tokens)
    begin(vllm, tokens, ticket)
    donor = step_until_prefilled(vllm, ticket)
    assert vllm.scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(vllm)
    event = vllm.finished(ticket)
    assert event.stored[: len(donor.stored)] == donor.stored
    assert sum(segment.length for segment in event.stored) == 400 + LONG - 1
    assert len([e for e in vllm.events() if isinstance(e, Prefilled) and e == donor]) == 1


def test_a_save_that_fails_is_tried_again_with_the_answer(
    vllm: Vllm, text: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reported of the prompt before that."""
    tokens = text(400, 7)
    ticket = vllm.ticket(tokens)
    begin(vllm, tokens, ticket)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise RuntimeError("no memory")

        patch.setattr("kvshare.vllm_connector.worker.host_copies.HostSave._copy", fail)
        for _ in range(4):
            vllm.llm.llm_engine.step()
    finish(vllm)
    assert vllm.prefilled(ticket) is None
    event = vllm.finished(ticket)
    assert (event.reason, sum(segment.length for segment in event.stored)) == (None, 400 + LONG - 1)


def test_a_prompt_that_is_dropped_meanwhile_gets_no_answer(vllm: Vllm, text: Texts) -> None:
    """The journal says that it is gone, and nothing of the request is left over."""
    tokens = text(400, 8)
    ticket = vllm.ticket(tokens)
    begin(vllm, tokens, ticket)
    donor = step_until_prefilled(vllm, ticket)
    vllm.side.scheduler.drop([segment.segment_id for segment in donor.stored])
    finish(vllm)
    event = vllm.finished(ticket)
    assert (event.reason, event.output_ids, event.stored) == ("segments_gone", (), ())
    vllm.ask((text(50), None, None))  # the next step carries the drops


def test_one_that_may_not_be_stored_is_not(vllm: Vllm, text: Texts) -> None:
    """Neither its prompt nor its answer."""
    tokens = text(400, 9)
    ticket = vllm.ticket(tokens, store=False)
    begin(vllm, tokens, ticket)
    finish(vllm)
    assert vllm.prefilled(ticket) is None
    assert vllm.finished(ticket).stored == ()
