"""Segments that are gone, or unreadable, when a plan needs them: their tokens are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    from delta_tree import SegmentId
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


def corrupt(vllm: Vllm, segment_id: SegmentId) -> None:
    """One row of the stored keys is no longer what was put there."""
    import torch

    vllm.forget_blocks()
    stored = vllm.worker.attached.store.find([segment_id])[segment_id]
    with torch.inference_mode():
        stored.rows[:, 1, 0, 250] += 1.0


def test_a_segment_that_vanished_is_computed(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """All copies of a dropped segment become placeholders; the prompt is exact again and kept whole."""
    tokens = text(600, 1)
    donor = vllm.store(tokens)
    assert vllm.drop(donor) == 3
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "segments_gone", ())
    assert [(s.start, s.length) for s in event.stored] == [(0, 256), (256, 344), (600, 3)]


def test_one_of_two_donors_vanished(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """What is left of the plan is carried out."""
    tokens = text(600, 2)
    first, second = vllm.store(tokens), vllm.store(tokens)
    plan = copies(first, (0, 200)) + copies(second, (220, 400)) + copies(first, (430, 580))
    vllm.drop(second)
    answer, event = vllm.shared(tokens, plan)
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("approx", "segments_gone", (0, 3))
    assert event.num_computed == 600 - 200 - 150


def test_corrupt_bytes_are_a_miss(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """A segment whose checksum no longer fits is computed instead, dropped, and told of as gone."""
    tokens = text(600, 3)
    good, bad = vllm.store(tokens), vllm.store(tokens)
    bad_id = bad.stored[0].segment_id
    corrupt(vllm, bad_id)
    answer, event = vllm.shared(tokens, copies(good, (0, 200)) + copies(bad, (220, 590)), max_tokens=8)
    assert answer.distance(vllm.plain(tokens, max_tokens=8)) <= LIMIT
    assert event.used == (0, 2)  # its second segment is whole
    assert bad_id in vllm.dropped()
    assert bad_id not in vllm.side.segments


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_corrupt_bytes_found_in_a_requests_last_step(
    vllm: Vllm, text: Texts, copies: Copies, max_tokens: int
) -> None:
    """What the slots hold is known before the first token, however soon the request ends."""
    tokens = text(600, 4)
    good, bad = vllm.store(tokens), vllm.store(tokens)
    corrupt(vllm, bad.stored[0].segment_id)
    plan = copies(good, (0, 200)) + copies(bad, (220, 590))
    answer, event = vllm.shared(tokens, plan, max_tokens=max_tokens)
    assert answer.distance(vllm.plain(tokens, max_tokens=max_tokens)) <= LIMIT
    assert event.stored
    assert bad.stored[0].segment_id not in {tuple(plan)[i].segment_id for i in event.used}


def test_a_segment_that_leaves_while_its_copy_is_in_use(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Copied KV is not kept as if it had been computed."""
    tokens = text(600, 14)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    vllm.begin(tokens, ticket, salt=private_salt(ticket.ticket_id), max_tokens=6)
    for _ in range(2):
        vllm.llm.llm_engine.step()
    vllm.drop(donor)
    while vllm.llm.llm_engine.has_unfinished_requests():
        vllm.llm.llm_engine.step()
    vllm.settle()
    event = vllm.finished(ticket)
    assert (event.reason, event.used, event.stored) == ("segments_gone", (), ())
