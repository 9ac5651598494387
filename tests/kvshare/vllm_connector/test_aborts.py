"""A client may go away at any time; nothing leaks and the next request is right."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.starts import IN_CHUNKS

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.copy_writer import RowCopy
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


@pytest.mark.parametrize("fails", [True, False])
def test_one_that_is_aborted_while_it_is_loaded(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Its blocks are free once the load is over, whatever that came to; nobody takes them for filled."""
    from vllm.v1.request import RequestStatus

    from kvshare.vllm_connector.worker.load_copies import row_copies

    tokens = text(600, 13)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, (0, 590)), exact_length=590)
    may_copy = threading.Event()

    def copy_late(*given: Any) -> list[RowCopy]:
        may_copy.wait()
        if fails:
            raise RuntimeError("out of memory, say")
        return row_copies(*given)

    with monkeypatch.context() as patch:
        patch.setattr("kvshare.vllm_connector.worker.copies_in_turn.row_copies", copy_late)
        request_id = vllm.begin(tokens, ticket, salt="tenant")
        for _ in range(3):
            vllm.core.step_fn()
        (request,) = vllm.scheduler.requests.values()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        vllm.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        vllm.core.step_fn()
        assert vllm.scheduler.requests
        may_copy.set()
        vllm.settle()
        vllm.llm.llm_engine.abort_request([request_id])
    vllm.check_idle()
    (answer,) = vllm.ask((tokens, None, "tenant"))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT


class TestAborts:
    """A client may go away at any time; nothing leaks and the next request is right."""

    @pytest.mark.parametrize("steps", [0, 1, 2, 5], ids=["waiting", "loaded", "decoding", "later"])
    @pytest.mark.parametrize("planned", [True, False])
    def test_at_any_step(
        self,
        vllm: Vllm,
        text: Texts,
        copies: Copies,
        monkeypatch: pytest.MonkeyPatch,
        steps: int,
        planned: bool,
    ) -> None:
        # A busy machine copies for longer than a step waits; then the load is complete some steps later.
        monkeypatch.setattr("kvshare.vllm_connector.worker.transfers.MAX_WAIT_S", 60.0)
        tokens = text(600, 20)
        donor = vllm.store(tokens)
        ticket = vllm.ticket(tokens, copies(donor, *SCATTERED) if planned else ())
        request_id = vllm.begin(tokens, ticket, salt=private_salt(ticket.ticket_id))
        for _ in range(steps):
            vllm.llm.llm_engine.step()
        vllm.llm.llm_engine.abort_request([request_id])
        vllm.settle()
        event = vllm.finished(ticket)
        # With its first token the prompt is complete; a planned one is loaded in the step before.
        assert bool(event.stored) == (steps > planned)
        answer, _ = vllm.shared(tokens, copies(donor, *SCATTERED))
        assert answer.distance(vllm.plain(tokens)) <= LIMIT

    @IN_CHUNKS
    def test_in_the_middle_of_a_long_prefill(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """An unfinished prefill is not kept."""
        tokens = text(900, 21)
        donor = vllm.store(tokens)
        ticket = vllm.ticket(tokens, copies(donor, (0, 100), (130, 300)))
        request_id = vllm.begin(tokens, ticket, salt=private_salt(ticket.ticket_id))
        for _ in range(2):
            vllm.llm.llm_engine.step()
        vllm.llm.llm_engine.abort_request([request_id])
        vllm.settle()
        assert vllm.finished(ticket).stored == ()
