"""What the proxy reads of a request in the end, and why a request shares nothing. No model."""

from __future__ import annotations

import pytest

from delta_tree import token_ids
from kvshare.reasons import Reason
from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest
from kvshare.vllm_connector.scheduler.ticket_reader import why_unshared
from kvshare.vllm_protocol.messages import Ticket, digest_of
from tests.kvshare.vllm_connector.scheduler.ticketed_requests import (
    OUTPUT,
    STORED,
    admit,
    end,
    new_request,
    request_prompt,
    result,
)


class TestReport:
    """What the proxy reads of it in the end."""

    def test_a_retained_request(self, running: TicketedRequest) -> None:
        end(running, retains=True)
        running.note_times({"write": 1.0, "save": 0.2})
        running.note_times({"save": 0.3})
        running.note_saved(lost=None)
        event = running.finished()
        assert (event.decision, event.reason, event.used) == ("approx", None, (0,))
        assert (event.num_computed, event.num_local) == (120, 0)
        assert (event.output_ids, event.stored) == (OUTPUT, STORED)
        assert event.stage_seconds == {"write": 1.0, "save": 0.5}

    def test_what_is_lost_while_it_is_saved_is_not_retained(self, running: TicketedRequest) -> None:
        end(running, retains=True)
        running.note_saved(lost=Reason.SAVE_FAILED)
        event = running.finished()
        assert (event.reason, event.used, event.output_ids, event.stored) == ("save_failed", (), (), ())
        assert event.decision == "approx"

    @pytest.mark.parametrize(
        ("failed", "unreadable", "lost"),
        [(False, (), None), (False, (1,), "segments_gone"), (False, (2,), None), (True, (), "load_failed")],
    )
    def test_a_prompt_that_was_saved_early_and_is_loaded_again(
        self, running: TicketedRequest, failed: bool, unreadable: tuple[int, ...], lost: str | None
    ) -> None:
        """Preempted in between. It was taken to consist of copy 0; no answer is added where it does not."""
        request_prompt(running)
        admit(running, num_local=0)
        running.note_load(result(failed, unreadable))
        assert (running.state, running.retention.lost) == (State.RUNNING, lost)
        assert running.is_as_saved is (lost is None)

    def test_one_that_is_aborted_while_it_is_loaded_again_leaves_its_prompt(
        self, running: TicketedRequest
    ) -> None:
        """As it was reported; its blocks are vLLM's, which waits for the load."""
        request_prompt(running)
        running.note_prompt_saved()
        admit(running, num_local=0)
        running.end(num_prompt=400)
        assert running.state is State.ENDING
        running.note_load(result())
        event = running.finished()
        assert (running.state, event.reason, event.stored) == (State.DONE, "aborted", STORED)

    def test_one_that_ends_before_its_second_load_begins_leaves_its_prompt(
        self, running: TicketedRequest
    ) -> None:
        """Preempted and looked up again; its prompt's save may still be under way."""
        request_prompt(running)
        running.look_up(0)
        running.retention.request_answer()
        running.end(num_prompt=400)
        assert running.state is State.SAVING
        running.note_prompt_saved()
        running.note_saved(lost=None)
        event = running.finished()
        assert (running.state, event.stored, event.output_ids) == (State.DONE, STORED, ())

    def test_why_less_was_shared(self) -> None:
        """What is not supported comes first, then a failed load, then what is missing."""
        assert new_request(unshared=Reason.NOT_PRIVATE).finished().reason == "not_private"
        request = new_request()
        admit(request, num_local=0, held=(0,))
        assert (request.finished().reason, request.finished().decision) == ("segments_gone", "approx")
        request.note_load(result(failed=True))
        assert (request.finished().reason, request.finished().decision) == ("load_failed", "full")


@pytest.mark.parametrize("attribute", ["lora_request", "pooling_params", "prompt_embeds", "resumable"])
def test_requests_of_other_kinds_are_refused(attribute: str) -> None:
    """One by one, on vLLM's own request object."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    tokens = list(range(40))
    request = Request("r", tokens, SamplingParams(max_tokens=1), None)
    ticket = Ticket("t", "ns", digest_of(tokens), len(tokens))
    assert why_unshared(request, ticket, token_ids(tokens), may_move_keys=True) is None
    setattr(request, attribute, ["something"])
    assert why_unshared(request, ticket, token_ids(tokens), may_move_keys=True) is not None
