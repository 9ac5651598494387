"""
How far an approximate answer is expected to be from the full prefill's, told from the plan's shape alone.

    log10 KL = intercept + sum of weight x feature        KL: mean over an answer's first tokens, nats

The weights are fitted on measured plans of one model (`kvshare bench calibrate`). A feature outside of what
was seen there counts as the nearest that was: a plan unlike any measured is expected to be as bad as the
worst of its kind, and not better or worse without end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from delta_tree import Copy, NodeId, Span
from kvshare.sharing.plan import clip, continues

FEATURES = ("lost", "new", "shift", "donors", "distance", "exact", "stale", "pieces")
_REACH = 32.0  # tokens behind the start of a piece over which its KV becomes the donor's again
_LEAST = 1e-4
FLOOR = 1e-6  # nats: below it KL is rounding

Vector = NDArray[np.float64]


def features(
    copies: Sequence[Copy], *, num_tokens: int, exact_length: int, tail: int, common: Mapping[NodeId, int]
) -> Vector:
    """
    (F,) what a plan's shape says, in the order of `FEATURES`; means are over copied tokens.

    lost      log of the tokens that stood in front of a copy in its donor and do not now
    new       log of the tokens that stand in front of it now and did not
    shift     log of how far copies moved
    donors    log of how many there are
    distance  log of the tokens from the start of the last piece to the end of the prompt
    exact     share of the prompt that is an exact prefix
    stale     log10 of the share of tokens near the start of a piece, where what changed in front is felt
    pieces    log of how many stretches from one place of one donor there are

    Units:   tokens; `copies` ascending by target, the exact ones may be among them; `tail`: last tokens that
             are computed anyway; `common`: by donor, the length of the prefix that it shares with the prompt
    """
    behind = Span(exact_length, max(exact_length, num_tokens - tail))
    foreign = [part for copy in copies if (part := clip(copy, behind))]
    if not foreign:
        return np.zeros(len(FEATURES))
    pieces = _pieces(foreign)
    weights = np.array([length for _, length in pieces], float) / sum(length for _, length in pieces)
    lost, new, shift = np.array([_churn(copy, foreign, common) for copy, _ in pieces], float).T
    ages = np.concatenate([np.arange(1, length + 1) for _, length in pieces])
    return np.array(
        [
            np.log1p(weights @ lost),
            np.log1p(weights @ new),
            np.log1p(weights @ shift),
            np.log(len({copy.donor for copy, _ in pieces})),
            np.log1p(num_tokens - pieces[-1][0].target_start),
            exact_length / num_tokens,
            np.log10((1 / (1 + ages / _REACH)).sum() / num_tokens + _LEAST),
            np.log(len(pieces)),
        ]
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """
    Weights for one model and one repair rule. All tuples are in the order of `FEATURES`.

    Features are clipped to [`low`, `high`] before they are weighed. `bias`: the mean of measured KL over the
    mean of what the logarithms predict; the mean is what plans are held to, and a few bad ones make it.
    """

    model: str
    rule: str
    intercept: float
    weights: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    bias: float
    spread: float  # standard deviation of the residuals, decades

    def typical(self, values: Vector) -> NDArray[np.float64]:
        """The KL that half of such plans stay below. Shapes: (..., F) -> (...)"""
        inside = np.clip(values, self.low, self.high)
        found: NDArray[np.float64] = 10 ** (self.intercept + inside @ np.array(self.weights))
        return found

    def expected(self, values: Vector) -> NDArray[np.float64]:
        """The mean KL of such plans. Shapes: (..., F) -> (...)"""
        return self.bias * self.typical(values)

    def as_document(self) -> dict[str, Any]:
        """JSON-ready; weights by the feature's name."""
        by_name = {
            name: {"weight": weight, "low": low, "high": high}
            for name, weight, low, high in zip(FEATURES, self.weights, self.low, self.high, strict=True)
        }
        own = {name: getattr(self, name) for name in ("model", "rule", "intercept", "bias", "spread")}
        return {**own, "features": by_name}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError that names what is missing or no number."""
        try:
            weights, low, high = (
                tuple(float(document["features"][name][column]) for name in FEATURES)
                for column in ("weight", "low", "high")
            )
            return cls(
                model=str(document["model"]),
                rule=str(document["rule"]),
                intercept=float(document["intercept"]),
                weights=weights,
                low=low,
                high=high,
                bias=float(document["bias"]),
                spread=float(document["spread"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"not a calibration: {type(exc).__name__}: {exc}") from exc


def fit(values: Vector, kl: NDArray[np.float64], *, model: str, rule: str, ridge: float = 3.0) -> Calibration:
    """
    The weights that predict log10 of measured KL best, by ridge regression on standardised features.

    Shapes:  values (N, F), kl (N,)
    """
    low, high = np.percentile(values, (2, 98), axis=0)
    inside = np.clip(values, low, high)
    mean, scale = inside.mean(axis=0), inside.std(axis=0) + 1e-9
    design, target = (inside - mean) / scale, np.log10(kl + FLOOR)
    centre = target.mean()
    solved = np.linalg.solve(
        design.T @ design + ridge * np.eye(design.shape[1]), design.T @ (target - centre)
    )
    weights = solved / scale
    intercept = float(centre - weights @ mean)
    predicted = intercept + inside @ weights
    return Calibration(
        model=model,
        rule=rule,
        intercept=intercept,
        weights=tuple(weights.tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        bias=float(kl.mean() / (10**predicted).mean()),
        spread=float((target - predicted).std()),
    )


def _pieces(copies: Sequence[Copy]) -> list[tuple[Copy, int]]:
    """First copy and length of each stretch from one place of one donor."""
    found = [(copies[0], copies[0].length)]
    for before, copy in pairwise(copies):
        if continues(before, copy):
            first, length = found.pop()
            found.append((first, length + copy.length))
        else:
            found.append((copy, copy.length))
    return found


def _churn(piece: Copy, foreign: Sequence[Copy], common: Mapping[NodeId, int]) -> tuple[int, int, int]:
    """Tokens in front of a piece that are gone, that are new, and how far it moved."""
    prefix = common[piece.donor]
    kept = prefix + sum(
        copy.length
        for copy in foreign
        if copy.donor == piece.donor
        and prefix <= copy.target_start < piece.target_start
        and copy.donor_start < piece.donor_start
    )
    lost, new = max(0, piece.donor_start - kept), max(0, piece.target_start - kept)
    return lost, new, abs(piece.target_start - piece.donor_start)
