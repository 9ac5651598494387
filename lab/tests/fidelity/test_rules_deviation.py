"""Rules that compare fresh K and V with the copied ones, recomputed from the product's own passes."""

import numpy as np
import pytest
import torch

from kvshare.kv.sequence import SequenceKV
from kvshare_lab.fidelity.layered import LayerUpdate
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.base import num_wanted
from kvshare_lab.fidelity.rules.deviation import falling
from kvshare_lab.fidelity.trial import Outcome, Selection, Trial
from lab.tests.fidelity.scenes import (
    CLOSE,
    Dense,
    best,
    dense,
    engine_kv,
    placed_by_hand,
    places,
    scenes,
    trial,
)

BUDGET = 0.15


def differences(made: Trial) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K and V, (L, T, H, D): the product's full prefill less what the plan writes."""
    k, v = placed_by_hand(made)
    full = engine_kv(made.model, made.scenario.prompt.token_ids)
    return full.k - k, full.v - v


def chosen(made: Trial, name: str) -> list[int]:
    return places(RULES[name].choose(made, BUDGET).rows)


@scenes
def test_the_released_variant_goes_by_squared_deviation_of_v(scene: str) -> None:
    """One selection, at layer 1."""
    made = trial(scene)
    _, v = differences(made)
    scores = (v[1] ** 2).sum(dim=(1, 2)).numpy()
    expected = best(scores, made.copied, num_wanted(made, BUDGET))
    assert chosen(made, "cacheblend-released") == expected


@scenes
def test_deviation_goes_by_k_and_v(scene: str) -> None:
    """Absolute, of both, at layer 1; mean-shift takes the same tokens."""
    made = trial(scene)
    k, v = differences(made)
    scores = (k[1].abs() + v[1].abs()).sum(dim=(1, 2)).numpy()
    expected = best(scores, made.copied, num_wanted(made, BUDGET))
    assert chosen(made, "deviation") == expected
    assert chosen(made, "mean-shift") == expected


@scenes
def test_dhd_weighs_the_deviation_by_attention(scene: str) -> None:
    """All attention that a token receives at layer 1, times the L1 norm of its value's deviation."""
    made = trial(scene)
    _, v = differences(made)
    attention = full_attention(made)[1].mean(dim=0).sum(dim=0).numpy()
    scores = attention * v[1].abs().sum(dim=(1, 2)).numpy()
    assert chosen(made, "dhd") == best(scores, made.copied, num_wanted(made, BUDGET))


@scenes
def test_the_blend_goes_by_the_norm_of_the_keys_deviation(scene: str) -> None:
    """L2, over all heads, at layer 1."""
    made = trial(scene)
    k, _ = differences(made)
    scores = k[1].flatten(1).norm(dim=1).numpy()
    assert chosen(made, "blend") == best(scores, made.copied, num_wanted(made, BUDGET))


@scenes
def test_the_oracle_knows_all_layers(scene: str) -> None:
    """Attention of the last 16 rows times the norms of both deviations, summed over layers."""
    made = trial(scene)
    k, v = differences(made)
    asked = torch.stack(full_attention(made)).mean(dim=1)[:, -16:].mean(dim=1)
    scores = (asked * (k.flatten(2).norm(dim=2) + v.flatten(2).norm(dim=2))).sum(dim=0).numpy()
    assert chosen(made, "oracle") == best(scores, made.copied, num_wanted(made, BUDGET))


def full_attention(made: Trial) -> list[torch.Tensor]:
    empty = torch.zeros(made.num_layers, made.num_tokens, 2, 16)
    everything = torch.arange(made.num_tokens)
    return dense(made.model, made.scenario.prompt.token_ids, empty, empty, everything).attention


def test_falling_counts() -> None:
    """Equal up to the check layer, then falling evenly to a third; by hand."""
    # 10 x 5 x (1.5, 1.5, 1.17, .83, .5) / 5.5 = 13.6, 13.6, 10.6, 7.6, 4.5; rounded, they are two too many
    assert falling(10, 5, most=100) == [14, 14, 10, 7, 5]
    assert falling(10, 5, most=12) == [12, 12, 12, 9, 5]  # what the cap takes goes to the next ones
    assert falling(12, 5, most=12) == [12] * 5
    assert falling(0, 5, most=12) == [0] * 5


@pytest.mark.parametrize("num_layers", [2, 3, 4, 12, 30])
def test_falling_counts_keep_their_mean(num_layers: int) -> None:
    """Whatever the cap, they never rise and never pass it."""
    for most in (1, 7, 100, 1000):
        for mean in {1, most // 3, most // 2, most * 4 // 5, most - 1, most}:
            counts = falling(mean, num_layers, most=most)
            assert sum(counts) == mean * num_layers
            assert counts == sorted(counts, reverse=True)
            assert counts[0] == counts[1] <= most


@scenes
def test_cacheblend_filters_layer_by_layer(scene: str) -> None:
    """The written-out decoder, keeping in each layer those of its rows that deviate most there."""
    made = trial(scene)
    k, v = placed_by_hand(made)
    counts = falling(num_wanted(made, BUDGET), made.num_layers, most=int(made.copied.sum()))
    sets: list[set[int]] = []

    def next_rows(
        layer: int, rows: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor
    ) -> torch.Tensor:
        repaired = torch.from_numpy(made.copied)[rows]
        sets.append(set(rows[repaired].tolist()))
        if layer == 0:
            return rows
        change = (fresh_k - k[layer, rows]).abs() + (fresh_v - v[layer, rows]).abs()
        scores = change.sum(dim=(1, 2)).masked_fill(~repaired, -1.0)
        kept = rows[scores.argsort(descending=True)[: counts[layer + 1]]]
        return torch.cat([rows[~repaired], kept]).sort().values

    k1, v1 = differences(made)
    first = best((k1[1].abs() + v1[1].abs()).sum(dim=(1, 2)).numpy(), made.copied, counts[0])
    start = torch.tensor(sorted({*first, *places(made.base)}))
    # layers 0 and 1 are fresh for every token: the probe has computed them
    golden_k, golden_v = k.clone(), v.clone()
    golden_k[:2, made.copied] = made.full.kv.k[:2, : made.num_tokens][:, made.copied].to(k.dtype)
    golden_v[:2, made.copied] = made.full.kv.v[:2, : made.num_tokens][:, made.copied].to(v.dtype)
    expected = dense(made.model, made.scenario.prompt.token_ids, golden_k, golden_v, start, next_rows)
    found = run(made, "cacheblend")
    assert [len(each) for each in sets] == counts[:-1]
    assert sets[0] > sets[2]
    assert_same(found, expected, made)
    assert found.b == pytest.approx(sum(counts) / (made.num_layers * made.num_tokens))
    assert found.charged == pytest.approx(
        found.b
        + made.base.sum() / made.num_tokens
        + 2 * (made.copied.sum() - counts[0]) / (made.num_layers * made.num_tokens)
    )


def run(made: Trial, name: str) -> Outcome:
    return made.run(RULES[name].choose(made, BUDGET), forced=False)


def assert_same(found: Outcome, expected: Dense, made: Trial) -> None:
    size = made.num_tokens
    torch.testing.assert_close(found.kv.k[:, :size].double(), expected.k, atol=5e-5, rtol=0)
    torch.testing.assert_close(found.kv.v[:, :size].double(), expected.v, atol=5e-5, rtol=0)
    last = expected.log_probabilities[-1:]
    torch.testing.assert_close(found.log_probabilities.double(), last, atol=5e-5, rtol=0)


def hand_made_update(made: Trial, chosen: list[int], k: torch.Tensor, v: torch.Tensor) -> LayerUpdate:
    """Layer 2 of a pass over the base and some repaired rows, whose fresh K and V are given, (T, H, D)."""
    kv = made.placed.fork(made.num_tokens)
    slots = torch.tensor(sorted({*places(made.base), *chosen}))
    old_k, old_v = kv.k[2, slots].clone(), kv.v[2, slots].clone()
    kv.k[2, slots], kv.v[2, slots] = k[slots], v[slots]
    repaired = torch.isin(slots, torch.tensor(chosen))
    return LayerUpdate(2, kv, slots, repaired, k[slots], v[slots], old_k, old_v)


def selection(made: Trial, name: str) -> Selection:
    return RULES[name].choose(made, BUDGET)


def test_a_blend_is_as_fresh_as_it_differs() -> None:
    """A fresh key's share is the change's norm over the old key's, at most 1; values are fresh."""
    made = trial("moved")
    rows = places(made.copied)[:3]
    k, v = (part[2, : made.num_tokens].clone() for part in (made.placed.k, made.placed.v))
    old_k, old_v = k.clone(), v.clone()
    k[rows[0]] *= 1.25  # a quarter of it: a quarter fresh
    k[rows[1]] *= -1.0  # twice of it: all fresh
    v[rows[2]] *= 0.5
    update = hand_made_update(made, rows, k, v)
    hook = selection(made, "blend").hook
    assert hook is not None
    hook.after_write(update)
    found_k, found_v = update.kv.k[2], update.kv.v[2]
    torch.testing.assert_close(found_k[rows[0]], old_k[rows[0]] * (1 + 0.25 * 0.25), atol=1e-5, rtol=0)
    torch.testing.assert_close(found_k[rows[1]], -old_k[rows[1]], atol=1e-5, rtol=0)
    torch.testing.assert_close(found_v[rows[2]], old_v[rows[2]] * 0.5, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_v[rows[0]], old_v[rows[0]], atol=1e-5, rtol=0)
    base = places(made.base)
    assert torch.equal(found_k[base], k[base])


def turned(rows: torch.Tensor, positions: torch.Tensor, made: Trial) -> torch.Tensor:
    """Keys (N, H, D) by so many positions each, with the product's rotation."""
    rotation = made.model.model.layout.rotation
    assert rotation is not None
    return torch.stack(
        [rotation.moved(row, int(position)) for row, position in zip(rows, positions, strict=True)]
    )


def test_a_shift_that_all_keys_share_is_mended_exactly() -> None:
    """All keys off by one vector at position 0, all values by another: the rows nobody computed are right."""
    made = trial("moved")
    size, everywhere = made.num_tokens, torch.arange(made.num_tokens)
    generator = torch.Generator().manual_seed(3)
    delta_k, delta_v = (0.3 * torch.randn(1, 2, 16, generator=generator) for _ in range(2))
    placed_k, placed_v = made.placed.k[2, :size], made.placed.v[2, :size]
    true_k = placed_k + turned(delta_k.expand(size, -1, -1), everywhere, made)
    true_v = placed_v + delta_v
    chosen = places(made.copied)[::9]
    update = hand_made_update(made, chosen, true_k, true_v)
    hook = selection(made, "mean-shift").hook
    assert hook is not None
    hook.after_write(update)
    others = sorted(set(places(made.copied)) - set(chosen))
    # the cap: no shift is larger than the row that it is added to
    small = [p for p in others if placed_k[p].norm() > delta_k.norm() and placed_v[p].norm() > delta_v.norm()]
    assert len(small) > len(others) / 2
    torch.testing.assert_close(update.kv.k[2, small], true_k[small], atol=1e-5, rtol=0)
    torch.testing.assert_close(update.kv.v[2, small], true_v[small], atol=1e-5, rtol=0)
    exact = slice(0, made.exact_length)
    assert torch.equal(update.kv.k[2, exact], made.placed.k[2, exact])
    assert torch.equal(update.kv.k[2, chosen], true_k[chosen])


def test_a_shift_is_capped_at_the_rows_own_size() -> None:
    """A shift a hundred times as large moves each row by its own norm."""
    made = trial("moved")
    size = made.num_tokens
    placed_v = made.placed.v[2, :size]
    delta = torch.full((1, 2, 16), 100.0)
    chosen = places(made.copied)[::9]
    update = hand_made_update(made, chosen, made.placed.k[2, :size].clone(), placed_v + delta)
    hook = selection(made, "mean-shift").hook
    assert hook is not None
    hook.after_write(update)
    others = sorted(set(places(made.copied)) - set(chosen))
    change = (update.kv.v[2, others] - placed_v[others]).flatten(1).norm(dim=1)
    torch.testing.assert_close(change, placed_v[others].flatten(1).norm(dim=1), atol=1e-3, rtol=1e-4)


def test_corrections_change_the_pass() -> None:
    """Blending and shifting give another answer than computing the same rows alone."""
    made = trial("moved")
    for name in ("blend", "mean-shift"):
        whole = selection(made, name)
        with_it = made.run(whole, forced=False)
        without = made.run(Selection(whole.rows), forced=False)
        assert float((with_it.log_probabilities - without.log_probabilities).abs().max()) > 100 * CLOSE
        assert isinstance(with_it.kv, SequenceKV)
        assert not np.isnan(with_it.log_probabilities.numpy()).any()
