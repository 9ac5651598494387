"""
Token ids and half-open spans of token positions, which all other modules of this package use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from delta_tree.errors import EditRangeError, InvalidTokensError

TokenIds = npt.NDArray[np.int32]
"""A prompt as token ids: shape (T,), int32, C-contiguous, read-only."""

_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Token positions `[start, end)`; an empty span has a position but no tokens."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise EditRangeError(f"span [{self.start}, {self.end}) must satisfy 0 <= start <= end")

    def __len__(self) -> int:
        return self.end - self.start

    def intersection(self, other: "Span") -> "Span":
        """Return the positions in both. If there are none: an empty span at the larger start."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.end, other.end)))


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same positions as sorted spans that neither overlap nor touch; empty ones are left out."""
    merged: list[Span] = []
    # Sorted by their starts alone: comparing whole spans takes several times as long.
    for span in sorted([span for span in spans if span.end > span.start], key=attrgetter("start")):
        if merged and span.start <= merged[-1].end:
            if span.end > merged[-1].end:
                merged[-1] = Span(merged[-1].start, span.end)
        else:
            merged.append(span)
    return tuple(merged)


def gaps(covered: Iterable[Span], length: int) -> tuple[Span, ...]:
    """Return the sorted maximal spans of `[0, length)` that no span covers. Raises EditRangeError."""
    merged = merge(covered)
    if merged and merged[-1].end > length:
        raise EditRangeError(f"span [{merged[-1].start}, {merged[-1].end}) reaches past {length} tokens")
    starts = (0, *(span.end for span in merged))
    ends = (*(span.start for span in merged), length)
    return tuple(filter(None, map(Span, starts, ends)))


def true_ranges(flags: npt.NDArray[np.bool_], *, at_least: int = 1) -> npt.NDArray[np.int64]:
    """(N, 2) the start and the end of each maximal row of at least so many true flags, ascending."""
    edges = np.flatnonzero(flags[1:] != flags[:-1])
    edges += 1
    outer = [0] * bool(len(flags) and flags[0]), [len(flags)] * bool(len(flags) and flags[-1])
    found = np.concatenate((outer[0], edges, outer[1])).astype(np.int64).reshape(-1, 2)
    return found if at_least == 1 else found[found[:, 1] - found[:, 0] >= at_least]


def true_spans(flags: npt.NDArray[np.bool_], first_position: int, *, at_least: int = 1) -> list[Span]:
    """Return the same as spans; `first_position` is the position of the first flag."""
    ranges = true_ranges(flags, at_least=at_least) + first_position
    return list(map(Span, *ranges.T.tolist()))


def consecutive(
    firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """
    Return so many numbers from each first one on, and which first one each belongs to.

    Shapes:  (N,), (N,) at least 0 -> twice (M,), where M is the sum of the counts
    """
    of = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(of)) + np.repeat(firsts - np.cumsum(counts) + counts, counts), of


def split(spans: Iterable[Span], length: int) -> tuple[Span, ...]:
    """Cut spans into parts of `length` tokens. The last part of a span has up to 2 x `length` - 1."""
    parts: list[Span] = []
    for span in spans:
        starts = range(span.start, max(span.start, span.end - length) + 1, length)
        parts += [Span(start, start + length) for start in starts[:-1]]
        parts.append(Span(starts[-1], span.end))
    return tuple(parts)


def token_ids(values: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """
    Return token ids as an array that cannot be written to.

    Shapes:  (T,) integers -> (T,) int32, C-contiguous, read-only; copied unless already so
    Raises:  InvalidTokensError if the values are not flat integers in [0, 2**31)
    """
    if isinstance(values, np.ndarray) and _is_read_only(values):
        return values
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as exc:
        raise InvalidTokensError("token ids must be a flat list of integers") from exc
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidTokensError(f"token ids must be flat integers, got shape {array.shape} of {array.dtype}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > _MAX_TOKEN_ID):
        raise InvalidTokensError(
            f"token ids must lie in [0, {_MAX_TOKEN_ID}], "
            f"got values from {int(array.min())} to {int(array.max())}"
        )
    ids: TokenIds = np.array(array, dtype=np.int32, order="C", copy=True)
    ids.flags.writeable = False
    return ids


def tokens_from_bytes(blob: bytes) -> TokenIds:
    """Return token ids from `ids.astype("<i4").tobytes()`, without a copy. Raises InvalidTokensError."""
    if len(blob) % 4:
        raise InvalidTokensError(f"{len(blob)} bytes are not a whole number of 4-byte token ids")
    return token_ids(np.frombuffer(blob, dtype="<i4"))


def _is_read_only(values: npt.NDArray[np.integer]) -> TypeGuard[TokenIds]:
    """Return whether `values` already is a `TokenIds` over memory that cannot be written to."""
    flags = values.flags
    return (
        values.dtype == np.int32
        and values.ndim == 1
        and flags.c_contiguous
        and not flags.writeable
        and (values.base is None or isinstance(values.base, bytes))
        and (values.size == 0 or int(values.min()) >= 0)
    )
