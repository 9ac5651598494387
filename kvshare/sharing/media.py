"""
How media limit a plan: a medium is copied as a whole, or nothing is copied from its start on.

An engine computes placeholders from their tokens alone; only its own prefill turns a medium into embeddings.
So no placeholder lies in a medium that comes before a copy:

    [ copy ][ placeholder ][ medium, copied ][ copy ][ medium that no donor has ][ computed with the tail ]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from delta_tree import Composition, Copy, Span, merge
from kvshare.sharing.plan import within


def copied_until(targets: Iterable[Span], media: Sequence[Span]) -> int | None:
    """Return the start of the first medium (ascending) that the targets do not cover as a whole, or None."""
    covered = merge(targets)
    for medium in media:
        if not any(span.start <= medium.start and medium.end <= span.end for span in covered):
            return medium.start
    return None


def with_whole_media(copies: Sequence[Copy], media: Sequence[Span]) -> tuple[Copy, ...]:
    """Return the copies (ascending, disjoint) up to the first medium that they do not cover as a whole."""
    end = copied_until((copy.target for copy in copies), media)
    return tuple(copies) if end is None else within(copies, Span(0, end))


def composed_with_whole_media(composition: Composition, media: Sequence[Span]) -> Composition:
    """Apply `with_whole_media` to a composition; its exact prefix ends there at the latest."""
    if not media:
        return composition
    end = copied_until((copy.target for copy in composition.copies), media)
    if end is None:
        return composition
    copies = within(composition.copies, Span(0, end))
    return replace(composition, copies=copies, exact_length=min(composition.exact_length, end))


def outside_media(spans: Iterable[Span], media: Sequence[Span]) -> tuple[Span, ...]:
    """Return the parts of the spans that lie in no medium, merged."""
    rest = list(spans)
    for medium in media:
        rest = [
            part
            for span in rest
            for part in (
                Span(span.start, max(span.start, min(span.end, medium.start))),
                Span(min(span.end, max(span.start, medium.end)), span.end),
            )
            if part
        ]
    return merge(rest)
