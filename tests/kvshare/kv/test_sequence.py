"""KV of one running sequence: its slots, the copies that are written into them, and what is cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from delta_tree import Copy, NodeId, SegmentId, Span
from kvshare.kv.layout import KVLayout, Reach
from kvshare.kv.movement import STAYS, Movement
from kvshare.kv.sequence import SegmentKV, SequenceKV

TURNS = Movement((1.0, 0.1), "half", 0)
CPU = torch.device("cpu")
UNIFORM = KVLayout.uniform(2, 2, 4, dtype=torch.float32, device=CPU).moving([(TURNS, STAYS)] * 2)
MIXED = KVLayout.of_shapes(
    [((2, 4), (2, 4)), ((1, 4), (1, 8)), ((2, 4), (2, 4))], dtype=torch.float32, device=CPU
).moving([(TURNS, STAYS)] * 3)


def filled(layout: KVLayout, capacity: int) -> SequenceKV:
    sequence = SequenceKV(layout, capacity)
    for plane in sequence.planes:
        plane.copy_(torch.randn(plane.shape))
    return sequence


def copy_of(number: int, offset: int, length: int, start: int, *, shift: int = 0) -> Copy:
    return Copy(NodeId(1), SegmentId(number), offset, length, start, start - shift, start - shift)


def written(
    layout: KVLayout, copies: Sequence[Copy], *segments: SegmentKV, computed: Sequence[Span] | None = None
) -> tuple[SequenceKV, int]:
    """Copies into 12 slots of -1. Returns the bytes as well."""
    sequence = SequenceKV(layout, 12)
    for plane in sequence.planes:
        plane.fill_(-1.0)
    by_id = {SegmentId(number): segment for number, segment in enumerate(segments, 1)}
    return sequence, sequence.write_copies(copies, by_id, computed=computed)


def same(sequence: SequenceKV, span: Span, source: Sequence[torch.Tensor], start: int = 0) -> bool:
    return all(
        torch.equal(plane[:, span.start : span.end], rows[:, start : start + len(span)])
        for plane, rows in zip(sequence.planes, source, strict=True)
    )


def is_untouched(sequence: SequenceKV, *slots: int) -> bool:
    return all(bool((plane[:, list(slots)] == -1.0).all()) for plane in sequence.planes)


@pytest.mark.parametrize("layout", [UNIFORM, MIXED])
def test_a_copy_is_written_into_its_slots_only(layout: KVLayout) -> None:
    """From its offset; all slots around it stay, and the bytes are those of its tokens."""
    segment = filled(layout, 6).cut(Span(0, 6))
    sequence, num_bytes = written(layout, [copy_of(1, 2, 3, 5)], segment)
    assert same(sequence, Span(5, 8), segment.planes, 2)
    assert is_untouched(sequence, *range(5), *range(8, 12))
    assert num_bytes == 3 * layout.bytes_per_token == 3 * sequence.bytes_per_token
    assert sequence.is_whole


def test_copies_of_several_segments_lie_next_to_each_other() -> None:
    """At both ends, too."""
    one, two = (filled(MIXED, 6).cut(Span(0, 6)) for _ in range(2))
    sequence, _ = written(MIXED, [copy_of(1, 0, 6, 0), copy_of(2, 1, 5, 6), copy_of(1, 5, 1, 11)], one, two)
    assert same(sequence, Span(0, 6), one.planes)
    assert same(sequence, Span(6, 11), two.planes, 1)
    assert same(sequence, Span(11, 12), one.planes, 5)


def test_a_copy_that_moves_turns_its_keys_only() -> None:
    """By as many positions; the segment is as it was, so it can be moved from there again."""
    segment = filled(MIXED, 4).cut(Span(0, 4))
    before = [plane.clone() for plane in segment.planes]
    sequence, _ = written(MIXED, [copy_of(1, 0, 4, 7, shift=5)], segment)
    for described, plane, rows in zip(MIXED.planes, sequence.planes, before, strict=True):
        expected = TURNS.moved(rows, 5) if described.name == "k" else rows
        assert torch.allclose(plane[:, 7:11], expected)
    assert all(map(torch.equal, segment.planes, before))
    assert not torch.equal(sequence.planes[0][:, 7:11], before[0])


def test_rows_that_are_not_known_to_move_are_not_moved() -> None:
    """Wrong KV is worse than none. Where nothing moves they are as good as any."""
    unknown = KVLayout.uniform(2, 2, 4, dtype=torch.float32, device=CPU)
    segment = filled(unknown, 4).cut(Span(0, 4))
    sequence, _ = written(unknown, [copy_of(1, 0, 4, 2)], segment)
    assert same(sequence, Span(2, 6), segment.planes)
    with pytest.raises(ValueError, match="cannot move a copy by 1 tokens"):
        written(unknown, [copy_of(1, 0, 4, 2, shift=1)], segment)


def test_layers_with_windows_get_only_the_slots_that_are_seen() -> None:
    """The others stay as they are; then the sequence lacks some, and no segment should be cut from it."""
    layout = UNIFORM.seeing([Reach(), Reach(3)])
    segment = filled(layout, 8).cut(Span(0, 8))
    sequence, num_bytes = written(layout, [copy_of(1, 0, 8, 0)], segment, computed=[Span(8, 10)])
    for plane, rows in zip(sequence.planes, segment.planes, strict=True):
        assert torch.equal(plane[0, :8], rows[0])
        assert torch.equal(plane[1, 6:8], rows[1, 6:])  # the first computed token, at 8, sees 6 and 7
        assert bool((plane[1, :6] == -1.0).all())
    assert num_bytes == (8 + 2) * layout.bytes_per_token // 2
    assert not sequence.is_whole
    assert not sequence.fork(4).is_whole


def test_layers_in_chunks_get_their_chunk() -> None:
    layout = UNIFORM.seeing([Reach(4, is_chunked=True)] * 2)
    segment = filled(layout, 6).cut(Span(0, 6))
    sequence, _ = written(layout, [copy_of(1, 0, 6, 0)], segment, computed=[Span(6, 7)])
    assert same(sequence, Span(4, 6), segment.planes, 4)
    assert is_untouched(sequence, 0, 1, 2, 3)


@pytest.mark.parametrize("layout", [UNIFORM, MIXED])
def test_new_rows_lie_where_attention_reads_them(layout: KVLayout) -> None:
    """Of each layer, whichever plane it is in; in any order of positions."""
    sequence = filled(layout, 8)
    positions = torch.tensor([5, 2])
    for layer in range(layout.num_layers):
        k, v = (rows[:, :, :8] for rows in sequence.layer(layer, 8))
        new_k, new_v = (torch.randn(rows.shape[1], 2, rows.shape[3]) for rows in (k, v))
        sequence.write(layer, positions, new_k, new_v)
        for rows, new in zip(sequence.layer(layer, 6), (new_k, new_v), strict=True):
            assert rows.shape[2] == 6
            assert torch.equal(rows[0][:, [5, 2]], new)


def test_what_attention_reads_is_no_copy() -> None:
    """What is written afterwards is seen."""
    sequence = filled(UNIFORM, 4)
    k, _ = sequence.layer(1, 4)
    sequence.write(1, torch.tensor([3]), torch.ones(2, 1, 4), torch.ones(2, 1, 4))
    assert bool((k[0, :, 3] == 1).all())


@pytest.mark.parametrize(("num_tokens", "capacity"), [(3, 4), (4, 4), (5, 8), (8, 8), (9, 9), (100, 100)])
def test_growing_keeps_what_is_there(num_tokens: int, capacity: int) -> None:
    """To twice as much at least, so that decoding copies rarely; never less."""
    sequence = filled(MIXED, 4)
    before = [plane.clone() for plane in sequence.planes]
    sequence.reserve(num_tokens)
    assert sequence.capacity == capacity
    assert same(sequence, Span(0, 4), before)


def test_a_fork_goes_its_own_way() -> None:
    """From its first tokens on, with as many slots."""
    sequence = filled(MIXED, 6)
    other = sequence.fork(4)
    assert same(other, Span(0, 4), sequence.planes)
    assert (other.capacity, other.is_whole) == (6, True)
    before = [plane.clone() for plane in sequence.planes]
    for plane in other.planes:
        plane.zero_()
    assert all(map(torch.equal, sequence.planes, before))


class TestSegment:
    """What is cut."""

    def test_it_is_a_copy_of_its_own(self) -> None:
        """Whatever becomes of the sequence."""
        sequence = filled(MIXED, 8)
        segment = sequence.cut(Span(2, 5))
        before = [plane.clone() for plane in segment.planes]
        for plane in sequence.planes:
            plane.zero_()
        assert all(map(torch.equal, segment.planes, before))
        assert segment.num_tokens == 3
        assert segment.num_bytes == 3 * MIXED.bytes_per_token
        assert segment.checksum() == segment.computed_checksum()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("layout", [UNIFORM, MIXED])
    def test_its_bytes_make_the_same_segment(self, layout: KVLayout, dtype: torch.dtype) -> None:
        """As they are written to disk, and without another copy."""
        layout = replace(layout, dtype=dtype)
        segment = filled(layout, 5).cut(Span(1, 5))
        rows = segment.rows()
        assert sum(row.nbytes for row in rows) == segment.num_bytes
        again = SegmentKV.of_rows(layout, 4, rows)
        assert all(map(torch.equal, again.planes, segment.planes))
        assert again.copied_checksum is None
        assert again.checksum() == segment.checksum()
        rows[0][0, 0] ^= 1
        assert again.checksum() != segment.checksum()

    def test_planes_of_another_model_are_refused(self) -> None:
        segment = filled(UNIFORM, 4).cut(Span(0, 4))
        for layout, num_tokens in ((MIXED, 4), (UNIFORM, 5)):
            with pytest.raises((RuntimeError, ValueError)):
                SegmentKV.of_rows(layout, num_tokens, segment.rows())

    def test_keys_and_values_have_names_where_all_layers_are_alike(self) -> None:
        segment = filled(UNIFORM, 4).cut(Span(0, 4))
        assert (segment.k.shape, segment.v.shape) == ((2, 4, 2, 4), (2, 4, 2, 4))
        assert np.shares_memory(segment.k.numpy(), segment.planes[0].numpy())
        with pytest.raises(ValueError, match="too many values"):
            _ = filled(MIXED, 4).k
