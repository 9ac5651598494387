"""
Ids by which prompts with media are compared: they stand for a medium's digest, in place of its placeholders.

vLLM gives every image the same placeholder token, as often as the model has embeddings for it. Here each of
these becomes an id of its own, cut from a stream that the medium's full digest and their number begin. So
the tokens of two media are equal where the media are, and nowhere else: the delta tree, the index and the
ticket's digest need to know nothing of media. Proxy and connector derive the same ids from what vLLM says of
the request.

Their number counts because some models cut an image into fewer tiles where a prompt has several, under the
same digest: its embeddings are other ones then, and not the beginning of those of more tiles.

The digest is vLLM's own, over the medium's bytes, the model and the processor's settings. An id that a client
gives a medium takes its place in vLLM, so the proxy removes such ids, and what is not a digest is not shared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_tree import Span, TokenIds

FIRST_ID = 1 << 30  # no vocabulary is that large
_BITS = FIRST_ID - 1
MIN_TOKENS = 9  # of 30 bits each: as many as the shortest digest has, so that equal ids mean equal digests
_DIGEST = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")  # blake3 and SHA-256, SHA-512


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a prompt: the placeholders it takes, and the digest of what it is."""

    span: Span
    digest: str

    @property
    def is_identified(self) -> bool:
        """Return whether its placeholders can stand for the whole digest."""
        return len(self.span) >= MIN_TOKENS and _DIGEST.fullmatch(self.digest) is not None


def are_shareable(media: Sequence[Medium], num_tokens: int) -> bool:
    """Return whether their placeholders, in a prompt of so many tokens, can stand for them."""
    return all(
        medium.is_identified and medium.span.start >= 0 and medium.span.end <= num_tokens for medium in media
    )


def identified(token_ids: TokenIds, media: Sequence[Medium]) -> TokenIds:
    """
    Return the tokens, with ids of the media in place of their placeholders.

    Shapes:  token_ids (T,) int32 -> (T,) int32, read-only; the same array without media
    Raises:  ValueError if a medium is not within the prompt
    """
    if not media:
        return token_ids
    ids = np.array(token_ids, dtype=np.int32)
    for medium in media:
        start, end = medium.span.start, medium.span.end
        if not 0 <= start < end <= len(ids):
            raise ValueError(f"a medium takes tokens {start} to {end} of {len(ids)}")
        seed = f"{medium.digest} {end - start}"
        stream = hashlib.shake_256(seed.encode()).digest(4 * (end - start))
        ids[start:end] = np.frombuffer(stream, dtype="<u4") & _BITS | FIRST_ID
    ids.flags.writeable = False
    return ids
