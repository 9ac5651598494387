"""
Loads that join a step of vLLM before their copies have arrived, with a step in flight: the answer is the
plain one, whatever happens to the load meanwhile.

Which loads join is decided by times, which a test has not; here all do, in one of the two ways.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.starts import ASYNC

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
pytestmark = ASYNC


@pytest.fixture(params=["at once", "announced", "from blocks"])
def vllm(vllm: Vllm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    """
    A load joins the step in which it begins, or it is announced as arrived with that step, as is one that may
    copy from the blocks of its donor.
    """
    from kvshare.vllm_connector.worker.load_copies import row_copies

    joining, joins_at_once = vllm.side.scheduler.joining, request.param == "at once"
    assert joining.step_tokens == 2048
    monkeypatch.setattr(joining, "take", lambda *_: joins_at_once)
    monkeypatch.setattr(joining, "_fits", lambda _: not joins_at_once)
    monkeypatch.setattr(joining, "_has_failed", False)
    monkeypatch.setattr(vllm.side.scheduler.donors, "can_be_copied", request.param == "from blocks")
    monkeypatch.setattr("kvshare.vllm_connector.worker.copies_in_turn.row_copies", late(row_copies))
    return vllm


def late(copying: Callable[..., Any]) -> Callable[..., Any]:
    """The copies of a load take longer than the steps in flight."""

    def copied(*given: Any) -> Any:
        time.sleep(0.05)
        return copying(*given)

    return copied


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_the_answer_is_the_plain_one(vllm: Vllm, text: Texts, copies: Copies, max_tokens: int) -> None:
    """And that of the others in the batch, of which two join the same step; what was computed is retained."""
    texts = [text(400 + 90 * seed, 50 + seed) for seed in range(3)]
    donors = [vllm.store(tokens) for tokens in texts]
    tickets = [
        vllm.ticket(tokens, copies(donor, (0, 100), (130, 300), (301, 390)))
        for tokens, donor in zip(texts, donors, strict=True)
    ]
    planned = [(t, ticket, private_salt(ticket.ticket_id)) for t, ticket in zip(texts, tickets, strict=True)]
    answers = vllm.ask(*planned, (text(500, 60), None, vllm.fresh()), max_tokens=max_tokens)
    for tokens, answer in zip([*texts, text(500, 60)], answers, strict=True):
        assert answer.distance(vllm.plain(tokens, max_tokens=max_tokens)) <= LIMIT
    for tokens, ticket in zip(texts, tickets, strict=True):
        event = vllm.finished(ticket)
        assert (event.decision, event.reason, event.num_computed) == ("approx", None, len(tokens) - 359)
        # Where others wait just then, what lies in the last block, which is not full, is not retained.
        assert 31 <= sum(segment.length for segment in event.stored) <= len(tokens) - 359 + max_tokens - 1
        again, _ = vllm.shared(tokens, copies(event, (310, 380)))
        assert again.distance(vllm.plain(tokens)) <= LIMIT


@pytest.mark.parametrize("what", ["copies", "pass", "sum", "missing"])
def test_what_fails_after_vllm_counts_on_it_is_computed(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """By the worker, in the step that the load joins. After a failure no load joins any more."""
    monkeypatch.setattr(vllm.side.scheduler.donors, "can_be_copied", False)  # blocks have nothing to check
    tokens = text(600, 5)
    donor = vllm.store(tokens)
    placeholders = vllm.worker.parts.placeholders
    with monkeypatch.context() as patch:
        if what == "copies":
            patch.setattr("kvshare.vllm_connector.worker.copies_in_turn.row_copies", late(fail))
        elif what == "pass":
            patch.setattr(placeholders, "_compute", fail)
        else:
            store = vllm.worker.attached.store
            for stored in store.find(segment.segment_id for segment in donor.stored).values():
                stored.sums = (
                    None if what == "missing" or stored.sums is None else np.bitwise_xor(stored.sums, 1)
                )
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED), max_tokens=8)
    assert answer.distance(vllm.plain(tokens, max_tokens=8)) <= LIMIT
    has_failed = what in ("copies", "pass")
    reason = "load_failed" if has_failed else "segments_gone"
    assert (event.decision, event.reason) == ("full", reason)
    assert vllm.side.scheduler.joining._has_failed == has_failed


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_a_client_that_leaves_at_any_step(
    vllm: Vllm, text: Texts, copies: Copies, steps: int, is_exact: bool
) -> None:
    """No block is given away while copies are written into it, and none is left over."""
    tokens = text(600, 20)
    donor = vllm.store(tokens)
    spans, exact = (((0, 590),), 590) if is_exact else (SCATTERED, 0)
    ticket = vllm.ticket(tokens, copies(donor, *spans), exact_length=exact)
    salt = vllm.fresh("tenant") if is_exact else private_salt(ticket.ticket_id)
    request_id = vllm.begin(tokens, ticket, salt=salt)
    for _ in range(steps):
        vllm.llm.llm_engine.step()
    vllm.llm.llm_engine.abort_request([request_id])
    vllm.settle()
    assert vllm.finished(ticket).ticket_id == ticket.ticket_id
    vllm.check_idle()
    (answer,) = vllm.ask((tokens, None, salt if is_exact else None))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
