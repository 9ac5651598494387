"""Planes: which rows a model keeps of a token, in which layers, and how each layer's rows move."""

from dataclasses import replace

import pytest
import torch

from delta_tree import Span
from kvshare.kv.layout import ALL_EARLIER, KVLayout, Reach
from kvshare.kv.movement import STAYS, Movement

TURNS = Movement((1.0, 0.1), "half", 0)
OTHER = Movement((1.0, 0.1), "interleaved", 0)
CPU = torch.device("cpu")


def layout(*shapes: tuple[tuple[int, int], tuple[int, int]]) -> KVLayout:
    return KVLayout.of_shapes(shapes, dtype=torch.float32, device=CPU)


def test_alike_layers_have_two_planes() -> None:
    found = layout(*[((2, 4), (2, 4))] * 3)
    assert str(found) == "k:3x2x4,v:3x2x4"
    assert found.bytes_per_token == 3 * 2 * 2 * 4 * 4
    assert [plane.shape for plane in found.empty(5)] == [(3, 5, 2, 4)] * 2


def test_layers_of_another_shape_have_planes_of_their_own() -> None:
    found = layout(((2, 4), (2, 4)), ((1, 4), (1, 8)), ((2, 4), (2, 4)))
    assert str(found) == "k:2x2x4,k:1x1x4,v:2x2x4,v:1x1x8"
    assert found.num_layers == 3
    assert found.places["k", 2] == (0, 1)
    assert found.places["v", 1] == (3, 0)


def test_each_layer_moves_in_its_own_way() -> None:
    found = layout(*[((2, 4), (2, 4))] * 3).moving([(TURNS, STAYS), (STAYS, STAYS), (OTHER, STAYS)])
    keys, values = found.planes
    rows = torch.randn(3, 5, 2, 4)
    moved = keys.moved(rows, 7)
    for layer, movement in enumerate((TURNS, STAYS, OTHER)):
        assert torch.equal(moved[layer], movement.moved(rows[layer], 7))
    assert torch.equal(values.moved(rows, 7), rows)
    assert found.can_move
    assert found.rotation is None


def test_one_rotation_of_all_keys_is_said_to_be_one() -> None:
    assert layout(*[((2, 4), (2, 4))] * 3).moving([(TURNS, STAYS)] * 3).rotation == TURNS


def test_rows_that_are_not_known_to_move_stay_where_they_are() -> None:
    unknown = layout(((2, 4), (2, 4)), ((2, 4), (2, 4))).moving([(TURNS, STAYS), (None, STAYS)])
    rows = torch.randn(2, 5, 2, 4)
    assert not unknown.can_move
    assert torch.equal(unknown.planes[0].moved(rows, 0), rows)
    with pytest.raises(ValueError, match="cannot move a copy by 3 tokens"):
        unknown.planes[0].moved(rows, 3)


def test_rows_that_move_otherwise_are_other_rows() -> None:
    """A namespace holds the digest: KV of one must not be written into the other."""
    shape = layout(((2, 4), (2, 4)))
    digests = {shape.moving([(movement, STAYS)]).digest for movement in (TURNS, OTHER, STAYS, None)}
    digests.add(shape.moving([(replace(TURNS, first=1), STAYS)]).digest)
    assert len(digests) == 5


WINDOW, CHUNK = Reach(4), Reach(4, is_chunked=True)


@pytest.mark.parametrize(
    ("reach", "firsts", "words"),
    [
        (ALL_EARLIER, [0, 0, 0, 0, 0, 0], "all earlier tokens"),
        (WINDOW, [0, 0, 0, 1, 5, 6], "the last 4"),
        (CHUNK, [0, 0, 0, 4, 8, 8], "chunks of 4"),
        (Reach(1), [0, 1, 3, 4, 8, 9], "the last 1"),
    ],
)
def test_a_token_sees_from_its_first_slot_on(reach: Reach, firsts: list[int], words: str) -> None:
    """One at a time and many together."""
    positions = [0, 1, 3, 4, 8, 9]
    assert reach.firsts(torch.tensor(positions)).tolist() == firsts
    assert [reach.first(position) for position in positions] == firsts
    assert str(reach) == words


@pytest.mark.parametrize(
    ("reach", "seen"),
    [
        (ALL_EARLIER, None),
        (WINDOW, (Span(0, 3), Span(7, 12), Span(17, 21))),
        (CHUNK, (Span(0, 3), Span(8, 12), Span(20, 21))),
        (Reach(10), (Span(0, 21),)),
    ],
)
def test_what_spans_see_is_merged(reach: Reach, seen: tuple[Span, ...] | None) -> None:
    """Each from what its first token sees to its own end."""
    assert reach.seen([Span(1, 3), Span(10, 12), Span(20, 21)]) == seen


def test_layers_of_one_reach_need_the_same_slots() -> None:
    """A part for each reach of a plane; all slots where nothing is said or all is needed."""
    plain = layout(*[((2, 4), (2, 4))] * 3)
    whole = [(part.plane, part.rows, part.slots) for part in plain.parts([Span(8, 9)])]
    assert whole == [(0, slice(None), None), (1, slice(None), None)]
    mixed = plain.seeing([WINDOW, ALL_EARLIER, WINDOW])
    assert [(part.plane, part.rows, part.slots) for part in mixed.parts(None)] == whole
    assert [(part.plane, part.rows, part.slots) for part in mixed.parts([Span(8, 9)])] == [
        (plane, rows, slots) for plane in (0, 1) for rows, slots in (([0, 2], (Span(5, 9),)), ([1], None))
    ]


def test_rows_of_some_layers_move_as_those_do() -> None:
    """By a slice or a list of them, in any order."""
    keys = layout(*[((2, 4), (2, 4))] * 3).moving([(TURNS, STAYS), (OTHER, STAYS), (STAYS, STAYS)]).planes[0]
    rows = torch.randn(3, 5, 2, 4)
    moved = keys.moved(rows, -3)
    for chosen in ([2, 0], [1]):
        assert torch.equal(keys.moved(rows[chosen], -3, layers=chosen), moved[chosen])
    assert torch.equal(keys.moved(rows[1:], -3, layers=slice(1, None)), moved[1:])


def test_a_layers_rows_are_found_in_their_planes() -> None:
    found = layout(((2, 4), (2, 4)), ((1, 4), (1, 8)))
    planes = [torch.randn(plane.shape) for plane in found.empty(3)]
    for layer, (number_k, number_v) in enumerate(((0, 2), (1, 3))):
        k, v = found.of_layer(planes, layer)
        assert torch.equal(k, planes[number_k][0])
        assert v.data_ptr() == planes[number_v].data_ptr()
