"""
The media of a request, and which parts of its prompt may be shared with them.

vLLM's own prefill turns a medium into embeddings, the connector's pass does not: so no placeholder of a load
lies in a medium. A load ends before the first medium that is not held as a whole. If it loses one, it fails.
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
    What this vLLM's model allows. `tokens`: ids that mark places of media, if the model takes media. If the
    text of a prompt has such an id, models may give it other positions.
    """

    tokens: Set[int] = field(default_factory=frozenset)
    are_shared: bool = False  # media have plain token positions, and no token attends to later ones

    def media_of(self, request: Request, token_ids: TokenIds) -> tuple[Medium, ...] | None:
        """
        Return the media of a request's prompt, ascending. Shapes:  token_ids (T,)

        Returns: None if the prompt must not be shared: because of its media, or of marking ids in its text
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
    Return the end of the last copy before the first medium that is neither copied as a whole nor among the
    `num_local` tokens that vLLM has; 0 if there is no such copy.
    """
    end = max((copy.target.end for copy in copies), default=0)
    if not media or not end:
        return end
    first = copied_until([Span(0, num_local), *(copy.target for copy in copies)], media)
    if first is None or first >= end:
        return end
    return max((copy.target.end for copy in copies if copy.target.end <= first), default=0)
