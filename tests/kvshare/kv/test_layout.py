"""Planes: which rows a model keeps of a token, in which layers, and how each layer's rows move."""

from dataclasses import replace

import pytest
import torch

from kvshare.kv.layout import KVLayout
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
