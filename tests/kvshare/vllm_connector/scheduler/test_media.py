"""Which prompts with media are shared, and how far. No model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from delta_tree import SegmentId, Span, token_ids
from kvshare.reasons import Reason
from kvshare.vllm_connector.scheduler.media import MediaRules, end_of_copies
from kvshare.vllm_connector.scheduler.ticket_reader import why_unshared
from kvshare.vllm_protocol.media import Medium, identified
from kvshare.vllm_protocol.messages import Ticket, WireCopy, WireOrder, WireSpan, digest_of


@pytest.mark.parametrize(("marks", "reason"), [({40}, None), ({40, 39}, Reason.MULTIMODAL)])
def test_a_prompt_with_a_token_that_marks_media_is_refused(marks: set[int], reason: Reason | None) -> None:
    """Even if the request has no media: nobody but the model knows which positions it gives such tokens."""
    tokens = list(range(40))
    assert why(tokens, MediaRules(marks, are_shared=True)) == reason


def why(tokens: list[int], rules: MediaRules, media: Sequence[Medium] = (), **fields: Any) -> Reason | None:
    """Why a request of vLLM with these media is not shared, whose ticket was made for them."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=medium.digest,
            mm_position=PlaceholderRange(offset=medium.span.start, length=len(medium.span)),
        )
        for medium in media
    ]
    request = Request("r", tokens, SamplingParams(max_tokens=1), None, mm_features=features)
    prompt = token_ids(tokens)
    within = [medium for medium in media if medium.span.end <= len(tokens)]
    digest = digest_of(identified(prompt, within))
    known: dict[str, Any] = {"prompt_digest": digest, "num_tokens": len(tokens)}
    ticket = Ticket("t", "ns", **known | fields)
    found = rules.media_of(request, prompt)
    return why_unshared(request, ticket, prompt, may_move_keys=True, media=found)


ONE, OTHER = "a" * 64, "b" * 64
IMAGES = MediaRules({290}, are_shared=True)
SPAN = Span(10, 30)
TOKENS = [5] * 10 + [290] * 20 + [6] * 10


@pytest.mark.parametrize(
    ("rules", "medium", "fields", "reason"),
    [
        (IMAGES, Medium(SPAN, ONE), {}, None),
        (MediaRules({290}), Medium(SPAN, ONE), {}, Reason.MULTIMODAL),  # positions are not those of tokens
        (IMAGES, Medium(SPAN, "cat.png"), {}, Reason.MULTIMODAL),  # a client's id
        (IMAGES, Medium(Span(10, 15), ONE), {}, Reason.MULTIMODAL),  # too short for its digest
        (IMAGES, Medium(Span(10, 29), ONE), {}, Reason.MULTIMODAL),  # a place without a medium
        (IMAGES, Medium(Span(25, 45), ONE), {}, Reason.MULTIMODAL),  # beyond the prompt's end
        (IMAGES, Medium(SPAN, ONE), {"prompt_digest": digest_of(TOKENS)}, Reason.PROMPT_MISMATCH),
        (IMAGES, Medium(SPAN, OTHER), {"prompt_digest": "0" * 32}, Reason.PROMPT_MISMATCH),
        (
            IMAGES,
            Medium(SPAN, ONE),
            {"order": WireOrder((WireSpan(0, 40),), (), 5, 40)},  # what is chosen may lie in the medium
            Reason.MULTIMODAL,
        ),
    ],
)
def test_which_media_are_shared(
    rules: MediaRules, medium: Medium, fields: dict[str, Any], reason: Reason | None
) -> None:
    assert why(TOKENS, rules, [medium], **fields) == reason


def copy(start: int, end: int) -> WireCopy:
    return WireCopy(SegmentId(1), start, end - start, start, start)


@pytest.mark.parametrize(
    ("copies", "num_local", "end"),
    [
        ((), 0, 0),
        ((copy(0, 40),), 0, 40),
        ((copy(0, 8),), 0, 8),  # the medium is vLLM's, with the tail
        ((copy(0, 8), copy(10, 20), copy(20, 40)), 0, 40),  # whole, of two segments
        ((copy(0, 8), copy(10, 20), copy(25, 40)), 0, 8),
        ((copy(0, 8), copy(31, 40)), 0, 8),
        ((copy(0, 8), copy(31, 40)), 30, 40),  # vLLM has it
        ((copy(20, 40),), 20, 40),  # and a part of it
    ],
)
def test_where_a_load_with_media_ends(copies: tuple[WireCopy, ...], num_local: int, end: int) -> None:
    """Before the first medium that the copies do not cover."""
    assert end_of_copies(copies, [SPAN], num_local) == end


@pytest.mark.parametrize(
    ("copies", "gone", "lacks"),
    [
        ((copy(0, 8), copy(10, 40)), (), False),
        ((copy(0, 8), copy(31, 40)), (), True),
        ((copy(0, 8), copy(10, 40)), (1,), True),
    ],
)
def test_a_load_knows_whether_it_would_compute_a_medium(
    copies: tuple[WireCopy, ...], gone: tuple[int, ...], lacks: bool
) -> None:
    """Its worker then lets vLLM compute the prompt."""
    from kvshare.vllm_connector.metadata import LoadRequest

    load = LoadRequest("r", (0,), 0, 40, token_ids(TOKENS), copies, media=(SPAN,))
    assert load.lacks_media(frozenset(map(SegmentId, gone))) == lacks
