"""
The media of a request, and which parts of its prompt may be shared with them.

vLLM's own prefill turns a medium into embeddings, the connector's pass does not: so no placeholder of a load
lies in a medium. A load ends before the first one that is not held as a whole; one that loses a medium fails.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from delta_tree import Span, TokenIds
from kvshare.sharing.media import copied_until
from kvshare.vllm_protocol.media import Medium, are_shareable
from kvshare.vllm_protocol.messages import WireCopy

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class MediaRules:
    """
    What this vLLM's model allows. `tokens`: ids that mark places of media, if the model takes them. A prompt
    may hold one next to its media, and models may give it other positions then.
    """

    tokens: Set[int] = field(default_factory=frozenset)
    are_shared: bool = False  # positions are those of tokens, and all that a token attends to is before it

    def media_of(self, request: Request, token_ids: TokenIds) -> tuple[Medium, ...] | None:
        """
        The media of a request's prompt (T,), ascending.

        Returns: None if they, or ids that mark media and stand in the text, forbid to share the prompt
        """
        media = tuple(
            Medium(Span(place.offset, place.offset + place.length), feature.identifier)
            for feature in request.mm_features
            for place in (feature.mm_position,)
        )
        if media and not (self.are_shared and are_shareable(media, len(token_ids))):
            return None
        if not self.tokens:
            return media
        in_text = np.isin(token_ids, list(self.tokens))
        for medium in media:
            in_text[medium.span.start : medium.span.end] = False
        return None if in_text.any() else media


def end_of_copies(copies: Sequence[WireCopy], media: Sequence[Span], num_local: int) -> int:
    """
    Where the last one ends before the first medium that they, and the `num_local` tokens that vLLM has, do
    not cover; 0 without one.
    """
    end = max((copy.target.end for copy in copies), default=0)
    if not media or not end:
        return end
    first = copied_until([Span(0, num_local), *(copy.target for copy in copies)], media)
    if first is None or first >= end:
        return end
    return max((copy.target.end for copy in copies if copy.target.end <= first), default=0)
