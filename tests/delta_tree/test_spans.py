"""Spans and token ids."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import EditRangeError, InvalidTokensError, Span, gaps, merge, split, token_ids
from delta_tree.spans import tokens_from_bytes

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: Span(p[0], p[0] + p[1])))


@given(spans)
def test_merge_and_gaps_divide_all_positions(covered: list[Span]) -> None:
    """Merged spans and gaps cover each position once, the merged ones just what was covered."""
    inside = {position for span in covered for position in range(span.start, span.end)}
    merged, open_spans = merge(covered), gaps(covered, 40)
    assert [p for span in merged for p in range(span.start, span.end)] == sorted(inside)
    everything = sorted((*merged, *open_spans))
    assert [p for span in everything for p in range(span.start, span.end)] == list(range(40))
    assert all(a.end < b.start for a, b in pairwise(merged))


@given(spans, st.integers(1, 12))
def test_parts_are_the_same_positions(covered: list[Span], length: int) -> None:
    """Each part has `length` tokens, the last of a span up to as many again less one."""
    merged = merge(covered)
    parts = split(merged, length)
    assert merge(parts) == merged
    assert all(a.end <= b.start for a, b in pairwise(parts))
    ends = {span.end for span in merged}
    assert all(len(part) == length for part in parts if part.end not in ends)
    assert all(len(part) < 2 * length for part in parts)


def test_span_relations() -> None:
    """Spans know their length and what they have in common."""
    span = Span(3, 7)
    assert (len(span), bool(span), bool(Span(2, 2))) == (4, True, False)
    assert span.intersection(Span(5, 9)) == Span(5, 7)
    assert not span.intersection(Span(8, 9))


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2)])
def test_impossible_spans_are_refused(start: int, end: int) -> None:
    """A span runs forward from a position that exists."""
    with pytest.raises(EditRangeError, match="0 <= start <= end"):
        Span(start, end)


def test_gaps_refuse_a_span_past_the_end() -> None:
    """A covered span must lie within the prompt."""
    with pytest.raises(EditRangeError, match="past 4 tokens"):
        gaps([Span(2, 5)], 4)


def test_token_ids_are_private_and_read_only() -> None:
    """Token ids are a copy that cannot be written, and are not copied a second time."""
    mine = np.array([1, 2, 3])
    ids = token_ids(mine)
    mine[0] = 9
    assert ids.tolist() == [1, 2, 3]
    assert ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 4
    assert token_ids(ids) is ids
    assert token_ids([]).dtype == np.int32


def test_a_read_only_view_of_writable_memory_is_copied() -> None:
    """Somebody else could still write through the base of a view."""
    base = np.array([1, 2, 3], dtype=np.int32)
    view = base[:2]
    view.flags.writeable = False
    ids = token_ids(view)
    base[0] = 9
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "values",
    [[-1], [2**31], [1.5], [True], [[1, 2]], ["a"], [2**80], np.array([-1], dtype=np.int32)],
)
def test_other_values_are_refused(values: object) -> None:
    """Only flat integers in [0, 2**31) are token ids."""
    with pytest.raises(InvalidTokensError):
        token_ids(values)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("blob", [b"\0\0\0", b"\xff\xff\xff\xff"])
def test_damaged_token_bytes_are_refused(blob: bytes) -> None:
    """Bytes are token ids only in fours and above zero."""
    with pytest.raises(InvalidTokensError):
        tokens_from_bytes(blob)
