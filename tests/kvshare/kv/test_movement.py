"""Movements are found by trying, and only believed where what is nearly right does not fit."""

import pytest
import torch

from kvshare.kv.movement import (
    STAYS,
    Movement,
    Observed,
    Pairing,
    Verification,
    find_movement,
    why_not_movable,
)

FLOAT32 = 1e-3
FAST = 1.0 / 10_000.0 ** (torch.arange(4) / 4)
SLOW = 1.0 / 1_000_000.0 ** (torch.arange(4) / 4)
HALF = 1.0 / 10_000.0 ** (torch.arange(2) / 2)


def rows(heads: int = 2, dim: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(12, heads, dim, generator=torch.Generator().manual_seed(seed))


def observed(true: Movement, here: torch.Tensor | None = None) -> list[Observed]:
    here = rows() if here is None else here
    return [Observed(here, true.moved(here, shift), shift) for shift in (37, 133)]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("table", "first"), [(FAST, 0), (SLOW, 0), (HALF, 0), (HALF, 4)])
def test_each_kind_of_rotation_is_found_among_all(table: torch.Tensor, first: int, pairing: Pairing) -> None:
    true = Movement.turning(table, pairing, first)
    found = find_movement([FAST, SLOW, HALF], observed(true), tolerance=FLOAT32)
    assert found.movement == true
    assert found.error < 1e-6
    assert found.control is not None
    assert found.control > 4


def test_tables_of_layers_with_larger_heads_are_no_candidates() -> None:
    """Layers of several head sizes have tables of several lengths."""
    larger = 1.0 / 10_000.0 ** (torch.arange(8) / 8)
    found = find_movement([larger, FAST], observed(Movement.turning(FAST)), tolerance=FLOAT32)
    assert found.movement == Movement.turning(FAST)


def test_rows_without_positions_stay() -> None:
    assert find_movement([FAST, SLOW], observed(STAYS), tolerance=FLOAT32).movement == STAYS


def test_a_rotation_is_a_turn_of_the_plane() -> None:
    """By hand: a quarter turn of the first pair."""
    quarter = Movement((torch.pi / 2,), "half", 0)
    assert quarter.moved(torch.tensor([1.0, 0.0]), 1).tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    pairs = Movement((torch.pi / 2, 0.0), "interleaved", 2)
    moved = pairs.moved(torch.tensor([9.0, 9.0, 1.0, 0.0, 5.0, 6.0]), 1)
    assert moved.tolist() == pytest.approx([9.0, 9.0, 0.0, 1.0, 5.0, 6.0], abs=1e-6)


def test_back_and_forth_is_where_it_was() -> None:
    """And nothing is computed, nor copied, where nothing moves."""
    here, true = rows(), Movement.turning(FAST)
    assert torch.allclose(true.moved(true.moved(here, 37), -37), here, atol=1e-6)
    assert true.moved(here, 0) is here
    assert STAYS.moved(here, 37) is here


def test_far_positions_are_not_rounded() -> None:
    """In float32, angles of a shift by millions would be off by tenths of a radian."""
    true, shift = Movement.turning(FAST), 2**24 + 1
    cos, sin = true.angles(torch.tensor([shift]))
    angles = shift * FAST.double()
    assert torch.allclose(cos[0], angles.cos().float(), atol=1e-6)
    assert torch.allclose(sin[0], angles.sin().float(), atol=1e-6)


def test_rows_that_are_moved_in_parts_are_those_moved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU cuts them along the longest dimension; the dimensions that stay are copied, too."""
    here, true = torch.randn(3, 50, 2, 12), Movement.turning(FAST, "interleaved", 4)
    whole = true.moved(here, 41)
    monkeypatch.setattr("kvshare.kv.movement._AT_ONCE", 100)
    assert torch.equal(true.moved(here, 41), whole)
    assert torch.equal(whole[..., :4], here[..., :4])


def test_movements_that_differ_have_other_names() -> None:
    """KV is shared by the name: by table, pairing and place, and not by how the table was written."""
    names = {
        Movement.turning(table, pairing, first).digest
        for table in (FAST, SLOW, FAST[:3])
        for pairing in ("half", "interleaved")
        for first in (0, 2)
    }
    assert len(names) == 12
    assert Movement.turning(FAST.double()).digest == Movement.turning(FAST).digest
    assert (str(Movement.turning(FAST, first=2)), str(STAYS)) == ("half 2:10", "stays")


def test_the_first_layer_that_cannot_move_is_named() -> None:
    """Keys before values, with the reason and how far off they are."""
    moves, stays = Verification(Movement.turning(FAST), 1e-6, 9.0), Verification(STAYS, 0.0, None)
    fails = Verification(None, 0.123, None, "no table fits")
    assert why_not_movable([(moves, stays)] * 2) == ""
    problem = why_not_movable([(moves, stays), (moves, fails), (fails, stays)])
    assert problem == "values of layer 1: no table fits (relative error 0.12)"


def test_what_no_table_explains_is_not_proved() -> None:
    other = Movement.turning(FAST * 1.01)
    found = find_movement([FAST, SLOW], observed(other), tolerance=FLOAT32)
    assert found.movement is None
    assert "no table" in found.reason


def test_what_fits_one_shift_only_is_not_proved() -> None:
    """As where the frequencies change with the position."""
    here = rows()
    one, other = Movement.turning(FAST), Movement.turning(SLOW)
    pairs = [Observed(here, one.moved(here, 37), 37), Observed(here, other.moved(here, 133), 133)]
    assert find_movement([FAST, SLOW], pairs, tolerance=FLOAT32).movement is None


@pytest.mark.parametrize(
    "here",
    [torch.zeros(12, 2, 8), torch.ones(12, 2, 8) * torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0])],
    ids=["nothing", "one head is as the other"],
)
def test_rows_that_would_fit_anything_prove_nothing(here: torch.Tensor) -> None:
    found = find_movement([FAST, SLOW], observed(Movement.turning(FAST), here), tolerance=FLOAT32)
    assert found.movement is None
    assert "wrong ones" in found.reason


def test_tables_that_differ_by_rounding_are_one() -> None:
    found = find_movement([FAST, FAST * (1 + 1e-9)], observed(Movement.turning(FAST)), tolerance=FLOAT32)
    assert found.movement is not None
    assert found.movement.frequencies == pytest.approx(FAST.tolist())


def test_large_dimensions_do_not_hide_small_ones() -> None:
    """Keys have a few dimensions that are a hundred times as large, and hardly turn."""
    here = rows()
    here[..., 3] *= 100
    here[..., 7] *= 100
    true = Movement.turning(FAST)
    assert find_movement([FAST, SLOW], observed(true, here), tolerance=FLOAT32).movement == true


def test_bfloat16_is_enough_to_tell() -> None:
    here = rows(dim=16)
    table = 1.0 / 10_000.0 ** (torch.arange(8) / 8)
    true = Movement.turning(table)
    pairs = [Observed(here.bfloat16(), true.moved(here, shift).bfloat16(), shift) for shift in (37, 133)]
    assert find_movement([table, FAST], pairs, tolerance=6e-2).movement == true


def test_without_a_table_only_what_is_equal_to_the_bit_stays() -> None:
    """Learned positions that are small beside the embeddings: nothing could tell them from rounding."""
    here = rows(dim=16).bfloat16()
    near = (here.float() + 0.04 * rows(dim=16, seed=1)).bfloat16()
    assert find_movement([], [Observed(here, near, 37)], tolerance=6e-2).movement is None
    assert find_movement([], [Observed(here, here.clone(), 37)], tolerance=6e-2).movement == STAYS


@pytest.mark.parametrize("factor", [1, 4, 8, 32])
def test_slow_tables_are_told_apart_in_bfloat16(factor: int) -> None:
    """Linear scaling: one position turns the fastest dimension by an eighth of a radian, or less."""
    table = 1_000_000.0 ** -(torch.arange(64) / 64) / factor
    other = 10_000.0 ** -(torch.arange(64) / 64)
    true, here = Movement.turning(table), rows(heads=4, dim=128)
    generator = torch.Generator().manual_seed(5)
    pairs = [
        Observed(
            here.bfloat16(),
            (true.moved(here, shift) + 0.01 * torch.randn(here.shape, generator=generator)).bfloat16(),
            shift,
        )
        for shift in (37, 133)
    ]
    assert find_movement([table, other], pairs, tolerance=6e-2).movement == true


def test_a_table_that_is_wrong_in_a_few_dimensions_is_not_proved() -> None:
    """Large dimensions make every error small beside the largest value."""
    here = rows(dim=16)
    here[..., 0] *= 1000
    here[..., 8] *= 1000
    true = Movement.turning(1.0 / 10_000.0 ** (torch.arange(8) / 8))
    wrong = torch.tensor(true.frequencies)
    wrong[2] *= 3
    found = find_movement([wrong], observed(true, here), tolerance=6e-2)
    assert found.movement is None


class TestKeysOfEightBits:
    """As vLLM's cache stores them. `-k eight_bits -s` prints the errors that docs/connector.md has."""

    TURN = Movement.turning(1.0 / 10_000.0 ** (torch.arange(32) / 32))

    @staticmethod
    def keys() -> torch.Tensor:
        return 9.0 * torch.randn(4000, 2, 64, generator=torch.Generator().manual_seed(1))

    @staticmethod
    def error(numbers: torch.Tensor, exact: torch.Tensor) -> float:
        return float(((numbers - exact).square().mean() / exact.square().mean()).sqrt())

    @pytest.mark.parametrize(("dtype", "rounding"), [("float8_e4m3fn", 0.0264), ("float8_e5m2", 0.0528)])
    def test_eight_bits_are_rounded_once_more(self, dtype: str, rounding: float) -> None:
        """
        Two roundings that do not depend on each other, against one of a key that is computed there; fewer
        where a pair turns so slowly that it stays.
        """
        keys, there = self.keys(), self.TURN.moved(self.keys(), 41)
        stored, computed = keys.to(getattr(torch, dtype)), there.to(getattr(torch, dtype))
        quantised, moved = (
            self.error(computed.float(), there),
            self.error(self.TURN.moved(stored, 41).float(), there),
        )
        print(f"{dtype}: quantised {quantised:.4f}, moved {moved:.4f}")  # noqa: T201  the table's figures
        assert quantised == pytest.approx(rounding, rel=0.02)
        assert 1.2 * quantised < moved < 1.02 * 2**0.5 * quantised

    @pytest.mark.parametrize("scale", [[0.037], [0.25, 3.7]])
    def test_a_scale_cancels_out(self, scale: list[float]) -> None:
        """Of a layer, or of each head: both numbers of a pair have the same."""
        factor = torch.tensor(scale)[:, None]
        stored = (self.keys() / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
        by_numbers = self.TURN.moved(stored.float() * factor, 41) / factor
        in_place = self.TURN.moved(stored, 41).float()
        differ = in_place != by_numbers.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert float(differ.float().mean()) < 1e-4  # where the product is rounded over the middle of a step
        per_dim = torch.linspace(0.5, 2.0, 64)  # which pairs do not have in common
        wrong = self.TURN.moved(stored.float() * per_dim, 41) / per_dim
        assert float((in_place != wrong.to(torch.float8_e4m3fn).float()).float().mean()) > 0.5

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_what_does_not_fit_becomes_the_largest(self, dtype: torch.dtype) -> None:
        """The longest pair there is, turned into one dimension."""
        largest = torch.finfo(dtype).max
        pair = torch.tensor([largest, largest]).to(dtype)
        eighth = Movement((torch.pi / 4,))
        assert eighth.moved(pair, 1).float().tolist() == pytest.approx([0.0, largest], abs=largest * 1e-6)
        assert eighth.moved(pair, -1).float().tolist()[0] == largest
