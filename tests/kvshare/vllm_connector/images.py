"""Prompts with images for a vLLM in this process, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_tree import Span, TokenIds, token_ids
from kvshare.vllm_protocol.media import Medium, identified
from kvshare.vllm_protocol.messages import FinishedReport, Ticket, WireCopy
from kvshare.vllm_protocol.salts import private_salt
from kvshare_lab.vllm.kinds import TEXT_TOKENS
from kvshare_lab.vllm.processors import IMAGE_SIZE, IMAGE_TOKEN, TOKENS_OF_AN_IMAGE

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Vllm


def image(seed: int) -> Any:
    """A random one; all have the same dimensions."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def words(length: int, seed: int) -> list[int]:
    """Text, without a token that marks a place of media."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, TEXT_TOKENS, length)]


@dataclass(frozen=True)
class Illustrated:
    """Parts of a prompt: text as token ids, and images by their seeds."""

    parts: tuple[list[int] | int, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where its images are, in tokens."""
        found, at = [], 0
        for part in self.parts:
            length = TOKENS_OF_AN_IMAGE if isinstance(part, int) else len(part)
            if isinstance(part, int):
                found.append(Span(at, at + length))
            at += length
        return tuple(found)

    def document(self, ids: Sequence[str | None] | None = None) -> dict[str, Any]:
        """vLLM's input. `ids`: a client's, of its images."""
        seeds = [part for part in self.parts if isinstance(part, int)]
        tokens = [
            token for part in self.parts for token in ([IMAGE_TOKEN] if isinstance(part, int) else part)
        ]
        media = {"multi_modal_data": {"image": [image(seed) for seed in seeds]}} if seeds else {}
        named = {"multi_modal_uuids": {"image": list(ids)}} if ids else {}
        return {"prompt_token_ids": tokens, **media, **named}

    def tokens(self, digests: Sequence[str]) -> TokenIds:
        """What it is compared by."""
        placed: list[int] = []
        for part in self.parts:
            placed += [IMAGE_TOKEN] * TOKENS_OF_AN_IMAGE if isinstance(part, int) else part
        media = [Medium(span, digest) for span, digest in zip(self.spans, digests, strict=True)]
        return identified(token_ids(placed), media)


class Gallery:
    """Asks a vLLM for prompts with images, and knows the digests that it gives them."""

    def __init__(self, vllm: Vllm) -> None:
        self.vllm = vllm
        self.seen: list[tuple[str, ...]] = []  # of the requests, in the order of their arrival
        scheduler = vllm.side.scheduler
        own = type(scheduler).on_new_request

        def noted(request: Any) -> None:
            self.seen.append(tuple(feature.identifier for feature in request.mm_features))
            own(scheduler, request)

        scheduler.on_new_request = noted  # type: ignore[method-assign]  # what vLLM says is noted only

    def plain(self, prompt: Illustrated, **sampling: Any) -> Answer:
        return self.vllm.ask((prompt.document(), None, self.vllm.fresh("plain")), **sampling)[0]

    def ticket(self, prompt: Illustrated, copies: Sequence[WireCopy] = ()) -> Ticket:
        """By the digests that vLLM gives these images: a request without a ticket says them."""
        self.vllm.ask((prompt.document(), None, self.vllm.fresh("plain")), max_tokens=1)
        tokens = prompt.tokens(self.seen[-1])
        return self.vllm.ticket(tokens.tolist(), copies)

    def store(self, prompt: Illustrated) -> FinishedReport:
        """Make it a donor."""
        ticket = self.ticket(prompt)
        self.vllm.ask((prompt.document(), ticket, self.vllm.fresh("tenant")))
        return self.vllm.finished(ticket)

    def shared(
        self, prompt: Illustrated, ticket: Ticket, ids: Sequence[str | None] | None = None
    ) -> tuple[Answer, FinishedReport]:
        """With its private salt."""
        document = prompt.document(ids)
        answer = self.vllm.ask((document, ticket, private_salt(ticket.ticket_id)))[0]
        return answer, self.vllm.finished(ticket)
