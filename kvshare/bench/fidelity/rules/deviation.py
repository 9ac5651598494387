"""
Rules that compare fresh K and V of the first layers with what is laid.

The keys and values of layer 0 depend on the token alone. Those of layer 1 need layer 0 for every token: the
probe. They are then what a full prefill would have, so the lab takes them from there and charges the probe.
"""

from __future__ import annotations

import numpy as np
import torch

from kvshare.bench.fidelity.layered import Step
from kvshare.bench.fidelity.rules.base import Rule, num_wanted, pieces
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.selection import Scores, highest

CHECK_LAYER = 1
_WIDEST, _NARROWEST = 1.5, 0.5  # of the mean ratio: the gradual filter's first and last layer


def probe(trial: Trial) -> float:
    """Layer-tokens: layers 0 and 1 for every token behind the exact prefix that is not computed anyway."""
    return float((CHECK_LAYER + 1) * trial.copied.sum())


def _charged(trial: Trial, selected: float) -> float:
    """What the probe costs beyond the rows that are repaired in those layers anyway."""
    return max(0.0, probe(trial) - (CHECK_LAYER + 1) * selected)


def _golden(trial: Trial) -> SequenceKV:
    """What is laid, with the K and V of the probe's layers fresh for every token: they are paid for."""
    kv = trial.laid.fork(trial.num_tokens)
    places = torch.from_numpy(trial.copied.nonzero()[0])
    for layers, true in ((kv.k, trial.full.kv.k), (kv.v, trial.full.kv.v)):
        layers[: CHECK_LAYER + 1, places] = true[: CHECK_LAYER + 1, places]
    return kv


def _norms(deviation: torch.Tensor, *, power: int) -> Scores:
    """(T,) sum over heads and dims of |deviation|^power at the check layer."""
    return deviation[CHECK_LAYER].abs().pow(power).sum(dim=(1, 2)).numpy()


def _single(scores: Scores, trial: Trial, budget: float) -> Selection:
    count = num_wanted(trial, budget)
    return Selection(highest(scores, trial.copied, count), probe=_charged(trial, count), kv=_golden(trial))


def _released(trial: Trial, budget: float) -> Selection:
    """One selection at layer 1, squared deviation of V."""
    return _single(_norms(trial.value_deviation, power=2), trial, budget)


def _deviation(trial: Trial, budget: float) -> Selection:
    """One selection at layer 1, absolute deviation of K and V."""
    scores = _norms(trial.key_deviation, power=1) + _norms(trial.value_deviation, power=1)
    return _single(scores, trial, budget)


class _Filter:
    """Keeps in each layer those of its rows that deviate most there, fewer from layer to layer."""

    def __init__(self, trial: Trial, counts: list[int]) -> None:
        self._laid, self._counts = trial.laid, counts

    def write(self, step: Step) -> None:
        return

    def keep(self, step: Step) -> torch.Tensor | None:
        if step.layer < CHECK_LAYER or step.layer + 1 >= len(self._counts):
            return None
        rows, slots = step.repaired, step.slots[step.repaired]
        changes = ((step.k, self._laid.k), (step.v, self._laid.v))
        scores = sum((fresh[rows] - old[step.layer, slots]).abs().sum(dim=(1, 2)) for fresh, old in changes)
        kept = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        kept[
            torch.as_tensor(scores).argsort(descending=True, stable=True)[: self._counts[step.layer + 1]]
        ] = True
        return kept


def _cacheblend(trial: Trial, budget: float) -> Selection:
    """
    HKVD tokens with gradual filtering (CacheBlend, section 4.3): r_1 above r, falling, r on the mean.

    Layers 0 and 1 compute everything (the probe); their share of the budget is the tokens chosen behind them.
    """
    total = num_wanted(trial, budget)
    scores = _norms(trial.key_deviation, power=1) + _norms(trial.value_deviation, power=1)
    counts = falling(total, trial.num_layers, most=int(trial.copied.sum()))
    first = highest(scores, trial.copied, counts[0])
    filtered = _Filter(trial, counts)
    return Selection(first, probe=_charged(trial, counts[0]), intervention=filtered, kv=_golden(trial))


def falling(mean: int, num_layers: int, *, most: int) -> list[int]:
    """Rows by layer: equal in the layers up to the check layer, then falling evenly; their mean is kept."""
    if mean >= most:
        return [most] * num_layers
    ratios = np.concatenate(
        [[_WIDEST] * CHECK_LAYER, np.linspace(_WIDEST, _NARROWEST, num_layers - CHECK_LAYER)]
    )
    even = np.round(mean * ratios * num_layers / ratios.sum())
    return _summing_to(mean * num_layers, [min(most, int(count)) for count in even])


def _summing_to(total: int, counts: list[int]) -> list[int]:
    """One row more or less in the layers behind the check layer, in turns, until the sum is right."""
    while (missing := total - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        for layer in range(CHECK_LAYER + 1, len(counts)):
            least = counts[layer + 1] if layer + 1 < len(counts) else 0
            if missing != 0 and least <= counts[layer] + step <= counts[layer - 1]:
                counts[layer] += step
                missing -= step
    return counts


def _dhd(trial: Trial, budget: float) -> Selection:
    """Attention that a token receives x L1 deviation of its value, at the check layer."""
    received = trial.full.watched.received_at[CHECK_LAYER]
    return _single(received * _norms(trial.value_deviation, power=1), trial, budget)


class _Blend:
    """Behind the check layer, mixes a repaired key with the laid one: the more it changed, the fresher."""

    def write(self, step: Step) -> None:
        rows = step.repaired
        if step.layer <= CHECK_LAYER or not bool(rows.any()):
            return
        fresh, old = step.k[rows], step.old_k[rows]
        change = (fresh - old).flatten(1).norm(dim=1)
        share = (change / old.flatten(1).norm(dim=1).clamp(min=1e-9)).clamp(max=1.0)[:, None, None]
        step.kv.k[step.layer, step.slots[rows]] = share * fresh + (1 - share) * old

    def keep(self, step: Step) -> torch.Tensor | None:
        return None


def _cacheslide(trial: Trial, budget: float) -> Selection:
    """Tokens whose key deviates most at layer 1; deeper, K is blended with what was laid."""
    count = num_wanted(trial, budget)
    scores = trial.key_deviation[CHECK_LAYER].flatten(1).norm(dim=1).numpy()
    rows = highest(scores, trial.copied, count)
    everything = count >= int(trial.copied.sum())  # at 100 % nothing is left to blend with
    return Selection(
        rows, probe=_charged(trial, count), intervention=None if everything else _Blend(), kv=_golden(trial)
    )


class _Shift:
    """
    Adds the repaired rows' mean change to the other rows of their piece, capped at the row's own size.

    Keys are compared as if all stood at position 0: a mean over rotated keys would mean nothing.
    """

    def __init__(self, trial: Trial) -> None:
        rotation = trial.model.model.rotation
        assert rotation is not None  # LayeredModel refuses models without
        self._frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64)
        self._pieces = pieces(trial)

    def write(self, step: Step) -> None:
        if step.layer <= CHECK_LAYER:  # everything is fresh there
            return
        for piece in self._pieces:
            rows = step.repaired & (step.slots >= piece.start) & (step.slots < piece.end)
            inside = torch.arange(piece.start, piece.end, device=step.slots.device)
            others = inside[~torch.isin(inside, step.slots[rows])]
            if bool(rows.any()) and len(others):
                self._shift(step, rows, others)

    def _shift(self, step: Step, rows: torch.Tensor, others: torch.Tensor) -> None:
        change = self._turned(step.k[rows] - step.old_k[rows], -step.slots[rows]).mean(0, keepdim=True)
        keys = self._turned(change.expand(len(others), -1, -1), others)
        step.kv.k[step.layer, others] += keys * _capped(keys, step.kv.k[step.layer, others])
        values = (step.v[rows] - step.old_v[rows]).mean(0, keepdim=True)
        step.kv.v[step.layer, others] += values * _capped(values, step.kv.v[step.layer, others])

    def keep(self, step: Step) -> torch.Tensor | None:
        return None

    def _turned(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Keys (N, H, D) rotated by so many positions each."""
        angles = by.double()[:, None, None] * self._frequencies.to(by.device)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = keys.chunk(2, dim=-1)
        turned: torch.Tensor = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned


def _capped(shift: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(N, 1, 1) at most 1: a shift never exceeds the row it is added to."""
    size: torch.Tensor = rows.flatten(1).norm(dim=1) / shift.flatten(1).norm(dim=1).clamp(min=1e-9)
    return size.clamp(max=1.0)[:, None, None]


def _shifted(trial: Trial, budget: float) -> Selection:
    """The tokens that deviate most at layer 1 are computed; their mean change is added to the others."""
    count = num_wanted(trial, budget)
    scores = _norms(trial.key_deviation, power=1) + _norms(trial.value_deviation, power=1)
    rows = highest(scores, trial.copied, count)
    return Selection(rows, probe=_charged(trial, count), intervention=_Shift(trial), kv=_golden(trial))


def _oracle(trial: Trial, budget: float) -> Selection:
    """Attention of the prompt's end x true deviation, all layers: what no server knows."""
    sizes = trial.value_deviation.flatten(2).norm(dim=2) + trial.key_deviation.flatten(2).norm(dim=2)
    scores = (trial.full.watched.from_last * sizes.numpy()).sum(axis=0)
    return Selection(highest(scores, trial.copied, num_wanted(trial, budget)))


RULES = (
    Rule("cacheblend", "CacheBlend", "arXiv:2405.16444, section 4.3", _cacheblend, probe, 3, per_layer=True),
    Rule(
        "cacheblend-released", "CacheBlend as released", "LMCache, YaoJiayi/CacheBlend", _released, probe, 2
    ),
    Rule("deviation", "deviation at layer 1", "", _deviation, probe, 2, published=False),
    Rule("dhd", "after KVShare v2 (DHD)", "arXiv:2503.16525v2", _dhd, probe, 2, after=True),
    Rule(
        "blend",
        "after CacheSlide (blending)",
        "FAST'26",
        _cacheslide,
        probe,
        2,
        after=True,
        per_layer=True,
    ),
    Rule(
        "mean-shift",
        "after AgentKVShift",
        "arXiv:2607.21604",
        _shifted,
        probe,
        2,
        after=True,
        per_layer=True,
    ),
    Rule("oracle", "attention x true deviation (oracle)", "", _oracle, published=False),
)
