"""
How good an answer is, by the papers' measures, and how certain that is: means over prompts with intervals.

A figure of a prompt is a number or, for BLEU, the counts from which the BLEU of a corpus is computed.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU

from kvshare.bench.fidelity import measures
from kvshare.bench.fidelity.measures import rounded

_RESAMPLES = 1000
_PERCENTILES = (2.5, 97.5)
_ORDER = 4  # of BLEU's n-grams
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Figures = NDArray[np.float64]


def plain(text: str) -> str:
    """Lower case, without punctuation and articles, as question answering compares texts."""
    letters = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return " ".join(_ARTICLES.sub(" ", letters).split())


def best(measure: Callable[[str, str], float], references: Sequence[str], found: str) -> float:
    """A measure of words against the accepted answer that fits best."""
    return max(measure(plain(reference), plain(found)) for reference in references)


def rouge_l(reference: str, found: str) -> float:
    """1 for equal texts, also for two empty ones."""
    return 1.0 if reference == found else measures.rouge_l(reference, found)


def bleu_counts(reference: str, found: str, *, language: str) -> Figures:
    """(10,) n-gram matches and n-grams of each order, lengths of answer and reference."""
    score = _bleu("zh" if language == "zh" else "13a").sentence_score(found, [reference])
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)


@cache
def _bleu(tokenize: str) -> BLEU:
    return BLEU(tokenize=tokenize, effective_order=True)


def corpus_bleu(counts: Figures) -> Figures:
    """
    BLEU of corpora, 0 to 1, as sacrebleu computes it: counts are summed, zeros smoothed.

    Shapes:  (R, n, 10), n answers' `bleu_counts` in each of R corpora -> (R,)
    """
    found = []
    for total in counts.sum(axis=1).astype(int).tolist():
        matches, ngrams, (length, wanted) = total[:_ORDER], total[_ORDER : 2 * _ORDER], total[2 * _ORDER :]
        score = BLEU.compute_bleu(matches, ngrams, length, wanted, smooth_method="exp").score
        found.append(score / 100)
    return np.array(found)


def interval(name: str, figures: Figures, less: Figures | None = None, *, seed: int) -> dict[str, float]:
    """
    The mean (for `bleu`: the corpus' score) of n prompts' figures, and the ends of its 95 % bootstrap
    interval.

    `less`: figures of the same prompts, whose mean is subtracted.
    """
    n = len(figures)
    draws = np.random.default_rng(seed).integers(0, n, (_RESAMPLES, n))
    draws = np.vstack([np.arange(n), draws])
    found = _summary(name, figures[draws])
    if less is not None:
        found = found - _summary(name, less[draws])
    low, high = np.percentile(found[1:], _PERCENTILES)
    return {"mean": rounded(float(found[0])), "low": rounded(float(low)), "high": rounded(float(high))}


def _summary(name: str, figures: Figures) -> Figures:
    """Shapes: (R, n, ...) -> (R,)"""
    return corpus_bleu(figures) if name == "bleu" else np.asarray(figures.mean(axis=1))


@dataclass(slots=True)
class Sheet:
    """Figures of one data set: by arm, budget and measure, one for each prompt."""

    data: str
    task: str | None = None  # where a table has several
    skipped: int = 0  # prompts of which nothing could be copied
    _figures: dict[tuple[str, float], dict[str, list[Any]]] = field(default_factory=dict)

    def add(self, arm: str, budget: float, figures: Mapping[str, float | Figures]) -> None:
        """The figures of one prompt."""
        own = self._figures.setdefault((arm, budget), {})
        for name, value in figures.items():
            own.setdefault(name, []).append(value)

    def rows(self, *, compared: Sequence[str] = (), seed: int) -> list[dict[str, Any]]:
        """
        A row for each arm and budget.

        `compared`: measures whose paired difference to the arm `full` is added as `..._minus_full`.
        """
        return [self._row(arm, budget, compared, seed) for arm, budget in self._figures]

    def _row(self, arm: str, budget: float, compared: Sequence[str], seed: int) -> dict[str, Any]:
        own = {name: np.array(values) for name, values in self._figures[arm, budget].items()}
        row: dict[str, Any] = {"data": self.data, "task": self.task, "arm": arm, "budget": budget or None}
        row = {name: value for name, value in row.items() if value is not None}
        row |= {"n": max(len(values) for values in own.values()), "skipped": self.skipped}
        for name, values in own.items():
            row[name] = interval(name, values, seed=seed)
            full = np.array(self._figures.get(("full", 0.0), {}).get(name, []))
            if name in compared and arm != "full" and len(full) == len(values):
                row[f"{name}_minus_full"] = interval(name, values, full, seed=seed)
        return row
