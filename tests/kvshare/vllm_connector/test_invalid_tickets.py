"""A ticket for something else, or one that cannot be read: the request is served without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvshare.vllm_protocol.messages import PROTOCOL, WireCopy
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


def test_a_plan_for_another_prompt(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Digest and length tie a plan to its prompt; any other is served without it and not kept."""
    tokens, other = text(600, 8), text(600, 9)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    (answer,) = vllm.ask((other, ticket, private_salt(ticket.ticket_id)))
    event = vllm.finished(ticket)
    assert answer.distance(vllm.plain(other)) <= LIMIT
    assert (event.reason, event.stored) == ("prompt_mismatch", ())


def test_segments_of_another_namespace_are_not_written(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """A ticket that names somebody else's segment gets nothing of it."""
    tokens = text(600, 10)
    donor = vllm.store(tokens, namespace="tenant-b")
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.used, event.num_computed) == ("full", (), 600)


def test_a_copy_beyond_its_segment_is_not_written(vllm: Vllm, text: Texts) -> None:
    """More tokens than the segment has: a plan from another time. It is computed."""

    tokens = text(600, 11)
    donor = vllm.store(tokens[:300])
    copy = WireCopy(donor.stored[0].segment_id, 100, 250, 100, 100)
    answer, event = vllm.shared(tokens, [copy])
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert event.used == ()


@pytest.mark.parametrize(
    "document",
    [
        None,
        7,
        {},
        {"protocol": 99},
        {"protocol": PROTOCOL, "ticket_id": "x"},
        {"copies": [[1, 2]]},
        {"copies": [[1, 0, 50, 0, 0], [1, 0, 50, 20, 20]]},
        {"copies": [[1, 0, 600, 0, 0]]},
        {"copies": "none"},
    ],
)
def test_a_ticket_that_cannot_be_read(vllm: Vllm, text: Texts, document: object) -> None:
    """Rubbish in kv_transfer_params is logged and ignored."""
    from vllm import SamplingParams

    tokens = text(600, 12)
    if isinstance(document, dict) and "copies" in document:
        document = vllm.ticket(tokens).to_json() | document
    params = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": {"kvshare": document}}
    )
    (output,) = vllm.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    vllm.settle()
    assert list(output.outputs[0].token_ids) == vllm.plain(tokens, max_tokens=2).tokens
