"""Reads which media vLLM has found in a prompt that it rendered, and where."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter

from delta_tree import Span
from kvshare.vllm_protocol.media import Medium

_IMAGE = "image"  # other media are not shared


def read_media(features: object) -> tuple[Medium, ...] | None:
    """
    Return the media of `features` in vLLM's answer, ascending; none for a text.

    Returns: None for other media than images, and for what is not understood: such a prompt is not shared
    """
    if not features:
        return ()
    digests, places = (_images(features, name) for name in ("mm_hashes", "mm_placeholders"))
    if digests is None or places is None or len(digests) != len(places):
        return None
    media = [_medium(digest, place) for digest, place in zip(digests, places, strict=True)]
    known = sorted((medium for medium in media if medium is not None), key=attrgetter("span.start"))
    is_apart = all(one.span.end <= other.span.start for one, other in pairwise(known))
    return tuple(known) if len(known) == len(media) and is_apart else None


def _images(features: object, name: str) -> list[object] | None:
    """Return the entries of a member; None if there are others than those of images."""
    by_modality = features.get(name) if isinstance(features, Mapping) else None
    if not isinstance(by_modality, Mapping) or any(by_modality[key] for key in by_modality if key != _IMAGE):
        return None
    entries = by_modality.get(_IMAGE)
    return entries if isinstance(entries, list) and entries else None


def _medium(digest: object, place: object) -> Medium | None:
    if not isinstance(digest, str) or not isinstance(place, Mapping):
        return None
    start, length = place.get("offset"), place.get("length")
    if type(start) is not int or type(length) is not int or start < 0 or length <= 0:
        return None
    return Medium(Span(start, start + length), digest)
