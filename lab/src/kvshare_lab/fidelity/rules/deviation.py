"""
Rules that compare fresh K and V of the first layers with the copied ones.

The keys and values of layer 0 depend on the token alone. Those of layer 1 need layer 0 for every token: this
is the probe. They then equal the full prefill's, so the lab takes them from there and charges the probe.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.repair_choice import Scores, highest
from kvshare_lab.fidelity.layered import LayerHook, LayerUpdate
from kvshare_lab.fidelity.rules.base import Choices, Ranking, no_probe, num_wanted, pieces, takes_all
from kvshare_lab.fidelity.trial import Selection, Trial

CHECK_LAYER = 1
_WIDEST, _NARROWEST = 1.5, 0.5  # of the mean ratio: the gradual filter's first and last layer


def _probe(trial: Trial) -> float:
    """Layer-tokens: layers 0 and 1 for every copied token that is not part of the base."""
    return float((CHECK_LAYER + 1) * trial.copied.sum())


def _charged(trial: Trial, selected: float) -> float:
    """What the probe costs beyond the rows that are repaired in its layers anyway."""
    return max(0.0, _probe(trial) - (CHECK_LAYER + 1) * selected)


def _probed(trial: Trial) -> SequenceKV:
    """The copies, with fresh K and V in the layers that the probe computed for every token."""
    kv = trial.placed.fork(trial.num_tokens)
    places = torch.from_numpy(trial.copied.nonzero()[0])
    for layers, true in ((kv.k, trial.full.kv.k), (kv.v, trial.full.kv.v)):
        layers[: CHECK_LAYER + 1, places] = true[: CHECK_LAYER + 1, places]
    return kv


def _sums(deviation: torch.Tensor, *, power: int = 1) -> Scores:
    """(T,) sum over heads and dims of |deviation|^power at the check layer."""
    return deviation[CHECK_LAYER].abs().pow(power).sum(dim=(1, 2)).numpy()


def _keys_and_values(trial: Trial) -> Scores:
    return _sums(trial.key_deviation) + _sums(trial.value_deviation)


def _squared_values(trial: Trial) -> Scores:
    return _sums(trial.value_deviation, power=2)


def _values_by_attention(trial: Trial) -> Scores:
    """The attention that a token receives at the check layer x the L1 deviation of its value."""
    return np.asarray(trial.full.attention.received_at[CHECK_LAYER] * _sums(trial.value_deviation))


def _key_norms(trial: Trial) -> Scores:
    return _norms(trial.key_deviation[CHECK_LAYER]).flatten().numpy()


def _most_deviating(
    trial: Trial, budget: float, *, scores: Ranking, correction: Callable[[Trial], LayerHook] | None = None
) -> Selection:
    """The tokens with the highest scores, in all layers; the correction changes KV in the deeper layers."""
    count = num_wanted(trial, budget)
    has_others = not takes_all(trial, budget)  # at 100 % nothing is left to correct or to mix with
    hook = correction(trial) if correction and has_others else None
    rows = highest(scores(trial), trial.copied, count)
    return Selection(rows, probe=_charged(trial, count), hook=hook, kv=_probed(trial))


class _Filter(LayerHook):
    """Continues in each layer with those of its rows that deviate most there, fewer from layer to layer."""

    def __init__(self, trial: Trial, counts: list[int]) -> None:
        self._placed, self._counts = trial.placed, counts

    def continuing(self, update: LayerUpdate) -> torch.Tensor | None:
        if update.layer < CHECK_LAYER or update.layer + 1 >= len(self._counts):
            return None
        rows, slots = update.repaired, update.slots[update.repaired]
        changes = ((update.k, self._placed.k), (update.v, self._placed.v))
        scores = sum((fresh[rows] - old[update.layer, slots]).abs().sum(dim=(1, 2)) for fresh, old in changes)
        order = torch.as_tensor(scores).argsort(descending=True, stable=True)
        found = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        found[order[: self._counts[update.layer + 1]]] = True
        return found


def _cacheblend(trial: Trial, budget: float) -> Selection:
    """
    Tokens of high KV deviation, fewer from layer to layer (CacheBlend, section 4.3). r: their mean share.

    Layers 0 and 1 compute everything (the probe). The budget pays in them for the tokens chosen there only.
    """
    counts = falling(num_wanted(trial, budget), trial.num_layers, most=int(trial.copied.sum()))
    rows = highest(_keys_and_values(trial), trial.copied, counts[0])
    hook = _Filter(trial, counts)
    return Selection(rows, probe=_charged(trial, counts[0]), hook=hook, kv=_probed(trial))


def falling(mean: int, num_layers: int, *, most: int) -> list[int]:
    """Rows by layer: equal up to the check layer, then falling evenly; their mean is exactly `mean`."""
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


class _Blend(LayerHook):
    """Behind the check layer, mixes a repaired key with the copied one: the more it changed, the fresher."""

    def after_write(self, update: LayerUpdate) -> None:
        rows = update.repaired
        if update.layer <= CHECK_LAYER or not bool(rows.any()):
            return
        fresh, old = update.k[rows], update.old_k[rows]
        share = (_norms(fresh - old) / _norms(old).clamp(min=1e-9)).clamp(max=1.0)
        update.kv.k[update.layer, update.slots[rows]] = share * fresh + (1 - share) * old


class _Shift(LayerHook):
    """
    Adds the repaired rows' mean change to the other rows of their piece, at most each row's own size.

    Keys are compared as if all were at position 0: keys that are rotated differently have no mean.
    """

    def __init__(self, trial: Trial) -> None:
        rotation = trial.model.model.layout.rotation
        assert rotation is not None  # LayeredModel raises an error for models without one
        self._frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64)
        self._pieces = pieces(trial)

    def after_write(self, update: LayerUpdate) -> None:
        slots = update.slots
        for piece in self._pieces if update.layer > CHECK_LAYER else ():  # up to there everything is fresh
            rows = update.repaired & (slots >= piece.start) & (slots < piece.end)
            inside = torch.arange(piece.start, piece.end, device=slots.device)
            others = inside[~torch.isin(inside, slots[rows])]
            if not bool(rows.any()) or not len(others):
                continue
            change = self._turned(update.k[rows] - update.old_k[rows], -slots[rows]).mean(0, keepdim=True)
            keys = self._turned(change.expand(len(others), -1, -1), others)
            values = (update.v[rows] - update.old_v[rows]).mean(0, keepdim=True)
            for layers, shift in ((update.kv.k, keys), (update.kv.v, values)):
                size = _norms(layers[update.layer, others]) / _norms(shift).clamp(min=1e-9)
                layers[update.layer, others] += shift * size.clamp(max=1.0)

    def _turned(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Keys (N, H, D), each rotated by its number of positions (N,)."""
        angles = by.double()[:, None, None] * self._frequencies.to(by.device)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = keys.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """(N, H, D) -> (N, 1, 1)"""
    norms: torch.Tensor = rows.flatten(1).norm(dim=1)
    return norms[:, None, None]


def _oracle(trial: Trial, budget: float) -> Selection:
    """Attention of the prompt's end x true deviation, in all layers: known to no server."""
    sizes = trial.value_deviation.flatten(2).norm(dim=2) + trial.key_deviation.flatten(2).norm(dim=2)
    scores = (trial.full.attention.from_last * sizes.numpy()).sum(axis=0)
    return Selection(highest(scores, trial.copied, num_wanted(trial, budget)))


CHOICES: Choices = {
    "cacheblend": (_cacheblend, _probe),
    "cacheblend-released": (partial(_most_deviating, scores=_squared_values), _probe),
    "deviation": (partial(_most_deviating, scores=_keys_and_values), _probe),
    "dhd": (partial(_most_deviating, scores=_values_by_attention), _probe),
    "blend": (partial(_most_deviating, scores=_key_norms, correction=lambda trial: _Blend()), _probe),
    "mean-shift": (partial(_most_deviating, scores=_keys_and_values, correction=_Shift), _probe),
    "oracle": (_oracle, no_probe),
}
