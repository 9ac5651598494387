"""Prompts with images in a real vLLM: a tiny LLaVA with its tower and a processor that needs only PIL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvshare.reasons import Reason
from tests.kvshare.vllm_connector.images import Gallery, Illustrated, words

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Copies, Start

LIMIT = 1e-4  # log-probability, float32
CLEARLY = 1e-3  # that of another image

# Two images; the second lies across the end of the first stored segment, at 256.
PROMPT = Illustrated((words(140, 1), 7, words(90, 2), 8, words(340, 3)))
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
NUM_TOKENS, NUM_SCATTERED = 602, 63


@pytest.fixture
def gallery(start: Start) -> Iterator[Gallery]:
    """A vLLM that takes three images a prompt."""
    vllm = start("llava", skip_tokenizer_init=False, limit_mm_per_prompt={"image": 3})
    gallery = Gallery(vllm)
    yield gallery
    del vllm.side.scheduler.on_new_request
    vllm.check_idle()


def first_differs(one: Answer, other: Answer) -> float:
    """How far log-probabilities of the first token are apart, at most; infinite without a common one."""
    a, b = one.logprobs[0], other.logprobs[0]
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=float("inf"))


def test_images_are_copied_as_if_computed(gallery: Gallery, copies: Copies) -> None:
    """Scattered runs of text beside two whole images; the answer is that of the same vLLM without sharing."""
    assert gallery.vllm.side.info().can_share_media
    donor, plain = gallery.store(PROMPT), gallery.plain(PROMPT)
    assert donor.stored
    for spans, num_computed in ((SCATTERED, NUM_SCATTERED), (((0, 601),), 1), (((0, 200),), 402)):
        answer, event = gallery.shared(PROMPT, gallery.ticket(PROMPT, copies(donor, *spans)))
        assert answer.distance(plain) <= LIMIT
        assert (event.decision, event.reason, event.num_computed) == ("approx", None, num_computed)


def test_the_copied_images_are_what_is_answered_from(gallery: Gallery, copies: Copies) -> None:
    """KV of a prompt with another image at this place would be noticed: the parity above is no accident."""
    other = Illustrated((words(140, 1), 9, words(90, 2), 8, words(340, 3)))
    plain, donor = gallery.plain(PROMPT), gallery.store(other)
    answer, _ = gallery.shared(PROMPT, gallery.ticket(PROMPT, copies(donor, *SCATTERED)))
    assert first_differs(answer, plain) > CLEARLY


def test_images_move_with_their_text(gallery: Gallery, copies: Copies) -> None:
    """The same images behind a longer beginning: their KV is rotated, and the new beginning is computed."""
    donor = gallery.store(PROMPT)
    longer = Illustrated((words(11, 4), *PROMPT.parts))
    answer, event = gallery.shared(longer, gallery.ticket(longer, copies(donor, (0, 590), shift=11)))
    assert (event.decision, event.reason, event.num_computed) == ("approx", None, 11 + 12)
    moved = first_differs(answer, gallery.plain(longer))
    wrong, _ = gallery.shared(longer, gallery.ticket(longer, [
        copy._replace(source_position=copy.target_start) for copy in copies(donor, (0, 590), shift=11)
    ]))  # fmt: skip
    assert moved < first_differs(wrong, gallery.plain(longer))


def test_another_image_of_the_same_size_is_never_copied(gallery: Gallery, copies: Copies) -> None:
    """Nor one that a client calls by the same id: a plan for one image is none for the other."""
    donor, ticket = gallery.store(PROMPT), gallery.ticket(PROMPT)
    other = Illustrated((words(140, 1), 9, words(90, 2), 8, words(340, 3)))
    plain = gallery.plain(other)
    for ids, reason in ((None, Reason.PROMPT_MISMATCH), (("a", "b"), Reason.MULTIMODAL)):
        planned = gallery.vllm.ticket(
            (), copies(donor, *SCATTERED), prompt_digest=ticket.prompt_digest, num_tokens=NUM_TOKENS
        )
        answer, event = gallery.shared(other, planned, ids)
        assert answer.distance(plain) <= LIMIT
        assert (event.decision, event.reason, event.stored) == ("full", reason, ())


@pytest.mark.parametrize(
    ("spans", "num_computed"),
    [
        (((0, 148), (160, 590)), 602),  # in the first image: there is no copy before it that ends
        (((0, 120), (130, 200), (210, 250), (270, 590)), 602 - 120 - 70),  # in the second one
    ],
)
def test_no_placeholder_falls_into_an_image(
    gallery: Gallery, copies: Copies, spans: tuple[tuple[int, int], ...], num_computed: int
) -> None:
    """Behind an image that a plan does not copy as a whole vLLM computes everything, and the image."""
    donor, plain = gallery.store(PROMPT), gallery.plain(PROMPT)
    answer, event = gallery.shared(PROMPT, gallery.ticket(PROMPT, copies(donor, *spans)))
    assert answer.distance(plain) <= LIMIT
    assert event.num_computed == num_computed


def test_an_image_that_is_lost_fails_the_load(gallery: Gallery, copies: Copies) -> None:
    """The connector cannot compute it: vLLM computes the prompt, and the answer is the same."""
    import torch

    donor, plain = gallery.store(PROMPT), gallery.plain(PROMPT)
    gallery.vllm.forget_blocks()
    stored = gallery.vllm.worker.attached.store.find([donor.stored[0].segment_id])
    with torch.inference_mode():
        stored[donor.stored[0].segment_id].rows[:, 1, 0, 250] += 1.0
    answer, event = gallery.shared(PROMPT, gallery.ticket(PROMPT, copies(donor, *SCATTERED)))
    assert answer.distance(plain) <= LIMIT
    assert (event.decision, event.reason) == ("full", Reason.LOAD_FAILED)
    assert event.num_computed == NUM_TOKENS


def test_a_text_and_images_are_computed_together(gallery: Gallery, copies: Copies) -> None:
    """Requests beside one that loads images are answered as alone."""
    donor, alone = gallery.store(PROMPT), Illustrated((words(200, 5),))
    seen = Illustrated((words(60, 6), 7, words(60, 7)))
    ticket = gallery.ticket(PROMPT, copies(donor, *SCATTERED))
    plain = [gallery.plain(prompt, max_tokens=12) for prompt in (alone, seen, PROMPT)]
    from kvshare.vllm_protocol.salts import private_salt

    answers = gallery.vllm.ask(
        (alone.document(), None, gallery.vllm.fresh("plain")),
        (seen.document(), None, gallery.vllm.fresh("plain")),
        (PROMPT.document(), ticket, private_salt(ticket.ticket_id)),
        max_tokens=12,
    )
    for answer, expected in zip(answers, plain, strict=True):
        assert answer.distance(expected) <= LIMIT
