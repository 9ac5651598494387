"""
Predicts from the shape of a plan how far its answer deviates from that of a full prefill.

    typical KL = 10 ** (intercept + sum of (weight + with_repairs x repaired) x feature)
    mean KL = bias x typical KL ** slope        KL: mean over an answer's first tokens, nats

The parameters are fitted on measured plans of one model (`kvshare calibrate`). A feature outside the
measured range is clipped to it, so that a prediction never extrapolates. The distribution has a heavy tail:
where the typical KL is small, a few plans have a large KL, and the mean is many times the typical value.
Where it is large, mean and typical value are close. Therefore the slope is below 1. Tables of risk
(`kvshare.sharing.risk`) say how far single answers may deviate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from delta_tree import Node, NodeId
from kvshare.sharing.placed import Placed, joined
from kvshare.sharing.plan import small_shift
from kvshare.sharing.risk import REGIMES, Regime, RiskTable

FEATURES = ("lost", "new", "shift", "donors", "distance", "exact", "stale", "pieces", "repaired")
_OWN = ("intercept", "bias", "slope", "spread", "at_length")  # parameters that belong to no one feature
_COLUMNS = ("weight", "with_repairs", "low", "high")  # of a feature in a calibration file
_REACH = 32.0  # tokens after the start of a stretch over which its KV approaches the donor's
_DOSE = 4.0  # repaired tokens per stale token; scales the logarithm of `repaired`
_MOST_STRETCHES = 512  # stretches whose context is compared; if there are more, a sample
_MOVED = 0.01  # a plan with a larger share of relocated tokens counts as moved text
_REPLACED = 0.2  # if more of the text in front of a copy was replaced, its context counts as another one

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """
    The features of a plan before repairs.

    `values`: (F - 1,) all features but the last. `stale`: tokens of the stretches, weighted less the further
    they are from the start; a stretch adds some 22 to 160. `far`: share of the copied tokens that are
    relocated.
    """

    values: tuple[float, ...]
    stale: float
    far: float
    num_tokens: int

    @property
    def regime(self) -> Regime:
        """Return the kind of plan: edited in place, moved within one donor, or composed of several donors."""
        if self.values[FEATURES.index("donors")] > 0:
            return "composed"
        return "moved" if self.far >= _MOVED else "in_place"

    def repaired(self, num_tokens: float | Sequence[float]) -> Vector:
        """Return the features, (F,), if `num_tokens` copies are repaired; (N, F) for several numbers."""
        counts = np.asarray(num_tokens, dtype=np.float64)
        features = np.empty((*counts.shape, len(self.values) + 1))
        features[..., :-1] = self.values
        features[..., -1] = np.log1p(_DOSE * counts / self.stale)
        return features


def shape_of(
    copies: Placed, *, num_tokens: int, exact_length: int, common: Mapping[NodeId, int]
) -> Shape | None:
    """
    Return the shape of a plan with these approximate copies, or None if there are none. The first three are
    means over copied tokens.

    lost      log of the tokens that are in front of a copy in its donor, but not in the prompt
    new       log of the tokens that are in front of a copy in the prompt, but not in its donor
    shift     log of how far copies moved
    donors    log of the number of donors
    distance  log of the tokens from the start of the last stretch to the end of the prompt
    exact     share of the prompt that is an exact prefix
    stale     log10 of the share of stale tokens, see `Shape`
    pieces    log of the number of stretches: contiguous copies of one donor
    repaired  log of the repaired tokens per stale token, see `Shape.repaired`

    Units:   tokens; `common`: by donor, the length of its common prefix with the prompt
    """
    if not len(copies):
        return None
    stretches = joined(copies)
    lengths = stretches[:, 3]
    weights = lengths / lengths.sum()
    some = slice(None, None, 1 + len(stretches) // _MOST_STRETCHES)  # of thousands a sample is enough
    shares = weights[some] / weights[some].sum()
    lost, new, shift = _churn(stretches[some], copies, common)
    stale = float(stale_tokens(lengths).sum())
    return Shape(
        values=(
            float(np.log1p(shares @ lost)),
            float(np.log1p(shares @ new)),
            float(np.log1p(shares @ shift)),
            float(np.log(len(set(stretches[:, 0].tolist())))),
            float(np.log1p(num_tokens - stretches[-1, 1])),
            exact_length / num_tokens,
            float(np.log10(stale / num_tokens)),
            float(np.log(len(stretches))),
        ),
        stale=stale,
        far=float(shares @ (shift > small_shift(num_tokens))),
        num_tokens=num_tokens,
    )


def stale_tokens(lengths: NDArray[np.int64]) -> Vector:
    """Return the stale tokens of stretches of these lengths: fewer in two parts of one than in the whole."""
    return _REACH * np.log1p(lengths / _REACH)


def carried(
    copies: Placed,
    donors: Mapping[NodeId, Node],
    *,
    known: Placed,
    common: Mapping[NodeId, int],
) -> float:
    """
    Return the expected deviation that copies carry from their donors: a mean over copied tokens.

    A copy carries its donor's deviation if the prompt still has nearly all of the donor's text in front of
    the copy, as after an edit in place. If much of that text was replaced, only the plan's shape counts:
    measured deviations did not add up (docs/fidelity.md). KV in a donor's exact prefix carries nothing.

    `known`: the approximate copies of the composition, before repairs; `common`: see `shape_of`
    """
    if not len(copies):
        return 0.0
    some = copies[:: 1 + len(copies) // _MOST_STRETCHES]
    lost, _, _ = _churn(some, known, common)
    starts, stops = some[:, 2], some[:, 2] + some[:, 3]
    deviations = np.zeros(len(some))
    for donor, node in donors.items():
        num_carried = np.maximum(0, stops - np.maximum(starts, node.exact_length))
        deviations += np.where(some[:, 0] == donor, node.deviation * num_carried, 0.0)
    is_kept = lost <= _REPLACED * starts
    return float(is_kept @ deviations) / int(some[:, 3].sum())


@dataclass(frozen=True, slots=True)
class Calibration:
    """
    Weights for one model and one repair rule. All tuples are in the order of `FEATURES`.

    Features are clipped to [`low`, `high`]; their weighted sum gives the typical KL. `with_repairs` is added
    to a weight for each unit of the last feature, as repairs change the effect of the others. `bias` and
    `slope` turn the typical KL into the mean, which a few bad plans dominate. KL is in nats. `risks`: by
    regime, how far answers may deviate. `at_length`: measured over expected deviation of plans with the
    longest measured prompts, at least 1. `least_repaired`: share of a prompt's tokens; `risks` hold for plans
    that repair at least so many.
    """

    intercept: float
    weights: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    bias: float
    spread: float  # standard deviation of the residuals, decades
    slope: float = 1.0
    with_repairs: tuple[float, ...] = (0.0,) * len(FEATURES)
    risks: Mapping[Regime, RiskTable] = field(default_factory=dict)
    at_length: float = 1.0
    least_repaired: float = 0.0

    def repairs_enough(
        self, repaired: Vector | Sequence[float], num_tokens: NDArray[np.int64] | int
    ) -> NDArray[np.bool_]:
        """(N,) whether `risks` hold for plans that repair so many tokens. A share is rounded to tokens."""
        enough: NDArray[np.bool_] = np.asarray(repaired) > self.least_repaired * num_tokens - 1
        return enough

    def typical(self, values: Vector) -> NDArray[np.float64]:
        """Return the median KL of such plans. Shapes: (..., F) -> (...)"""
        weights, with_repairs, low, high = _columns(self.weights, self.with_repairs, self.low, self.high)
        inside = np.minimum(np.maximum(values, low), high)
        weights = weights + with_repairs * inside[..., -1:]
        found: NDArray[np.float64] = 10 ** (self.intercept + (inside * weights).sum(axis=-1))
        return found

    def expected(self, values: Vector) -> NDArray[np.float64]:
        """Return the mean KL of such plans. Shapes: (..., F) -> (...)"""
        return self.mean_where(self.typical(values))

    def mean_where(self, typical: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean KL of plans with the median `typical`, nats."""
        return self.bias * typical**self.slope

    def as_document(self) -> dict[str, Any]:
        """Return it as JSON takes it, weights by the feature's name."""
        by_name = {
            name: dict(zip(_COLUMNS, columns, strict=True))
            for name, *columns in zip(
                FEATURES, self.weights, self.with_repairs, self.low, self.high, strict=True
            )
        }
        own = {name: getattr(self, name) for name in _OWN}
        risks = {regime: table.as_document() for regime, table in self.risks.items()}
        least = {"least_repaired": self.least_repaired} if self.least_repaired else {}
        return {**own, **least, "features": by_name, "risks": risks}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError with the name of a value that is missing or not a number."""
        try:
            weights, with_repairs, low, high = (
                tuple(float(document["features"][name][column]) for name in FEATURES) for column in _COLUMNS
            )
            result = cls(
                **{name: float(document[name]) for name in _OWN},
                weights=weights,
                with_repairs=with_repairs,
                low=low,
                high=high,
                least_repaired=float(document.get("least_repaired", 0.0)),
                risks={
                    regime: RiskTable.from_document(document["risks"][regime])
                    for regime in REGIMES
                    if regime in document["risks"]
                },
            )
            numbers = [getattr(result, name) for name in _OWN]
            if not 0 <= result.least_repaired <= 1:
                raise ValueError(f"least_repaired is {result.least_repaired}, expected a share from 0 to 1")
            is_finite = all(map(isfinite, (*numbers, *weights, *with_repairs, *low, *high)))
            if not is_finite or result.bias <= 0 or result.slope <= 0 or result.at_length < 1:
                raise ValueError("expected finite numbers, bias and slope above 0, at_length at least 1")
            return result
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"not a calibration: {type(exc).__name__}: {exc}") from exc


@lru_cache(maxsize=64)  # a model has one of each rule, a lab some more
def _columns(*columns: tuple[float, ...]) -> Vector:
    """Return the columns as one array, (C, F)."""
    return np.array(columns)


def _churn(stretches: Placed, copies: Placed, common: Mapping[NodeId, int]) -> tuple[Vector, Vector, Vector]:
    """Return for each stretch the removed tokens before it, the new tokens before it, and its shift."""
    donors, target, source = stretches[:, 0], stretches[:, 1].astype(float), stretches[:, 2].astype(float)
    stayed = np.zeros(len(stretches))
    for donor in dict.fromkeys(donors.tolist()):
        own, prefix = donors == donor, common[donor]
        given = copies[(copies[:, 0] == donor) & (copies[:, 2] >= prefix)]
        stayed[own] = prefix + _in_front(given, target[own], source[own])
    return np.maximum(0, source - stayed), np.maximum(0, target - stayed), np.abs(target - source)


def _in_front(copies: Placed, target: Vector, source: Vector) -> NDArray[np.int64]:
    """Return for each pair of positions the tokens of the copies that start before it in both prompts."""
    _, at, of, length = copies.T
    if (of[1:] >= of[:-1]).all():  # usually in order: then the copies before a position are the first ones
        before = np.minimum(at.searchsorted(target), of.searchsorted(source))
        num_before: NDArray[np.int64] = np.concatenate([[0], np.cumsum(length)])[before]
    else:
        num_before = ((at < target[:, None]) & (of < source[:, None])) @ length
    return num_before
