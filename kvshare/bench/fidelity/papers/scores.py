"""
How good an answer is, by the papers' measures, and how sure that is: means over prompts with intervals.

A figure of a prompt is a number, or, for BLEU, the counts that a corpus' BLEU is computed from.
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
from kvshare.bench.fidelity.measures import jaccard, rounded, token_f1

_RESAMPLES = 1000
_PERCENTILES = (2.5, 97.5)
_ORDER = 4  # of BLEU's n-grams
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Figures = NDArray[np.float64]
Summary = Callable[[Figures], Figures]
Interval = dict[str, float]  # mean, low, high


def plain(text: str) -> str:
    """Lower case, without punctuation and articles: how question answering compares."""
    kept = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return " ".join(_ARTICLES.sub(" ", kept).split())


def best_f1(references: Sequence[str], found: str) -> float:
    """Token F1 with the accepted answer that fits best."""
    return max(token_f1(plain(reference), plain(found)) for reference in references)


def best_jaccard(references: Sequence[str], found: str) -> float:
    return max(jaccard(plain(reference), plain(found)) for reference in references)


def rouge_l(reference: str, found: str) -> float:
    """1 for equal texts, two empty ones too."""
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
    BLEU of corpora, 0 to 1, as sacrebleu computes it: counts are added up, zeros smoothed.

    Shapes:  (R, n, 10), n answers as `bleu_counts` gives them -> (R,)
    """
    return np.array([_bleu_of(total) for total in counts.sum(axis=1).astype(int).tolist()])


def _bleu_of(total: list[int]) -> float:
    matches, ngrams, (length, wanted) = total[:_ORDER], total[_ORDER : 2 * _ORDER], total[2 * _ORDER :]
    found = BLEU.compute_bleu(matches, ngrams, length, wanted, smooth_method="exp")
    return float(found.score) / 100


def mean(figures: Figures) -> Figures:
    """Shapes: (R, n) -> (R,)"""
    return np.asarray(figures.mean(axis=1))


_SUMMARIES: Mapping[str, Summary] = {"bleu": corpus_bleu}  # all others are means


def interval(summary: Summary, figures: Figures, less: Figures | None = None, *, seed: int) -> Interval:
    """
    The summary of n prompts' figures with the ends of its 95 % bootstrap interval.

    `less`: an arm's figures of the same prompts; what is reported is the difference.
    """
    n = len(figures)
    draws = np.random.default_rng(seed).integers(0, n, (_RESAMPLES, n))
    draws = np.vstack([np.arange(n), draws])
    found = summary(figures[draws])
    if less is not None:
        found = found - summary(less[draws])
    low, high = np.percentile(found[1:], _PERCENTILES)
    return {"mean": rounded(float(found[0])), "low": rounded(float(low)), "high": rounded(float(high))}


@dataclass(slots=True)
class Sheet:
    """Figures of one data set: by arm, budget and measure, a row per prompt."""

    data: str
    task: str | None = None  # where a table has several
    skipped: int = 0  # prompts of which nothing could be copied
    _figures: dict[tuple[str, float], dict[str, list[Any]]] = field(default_factory=dict)

    def add(self, arm: str, budget: float, figures: Mapping[str, float | Figures]) -> None:
        """One prompt's figures."""
        own = self._figures.setdefault((arm, budget), {})
        for name, value in figures.items():
            own.setdefault(name, []).append(value)

    def rows(self, *, compared: Sequence[str] = (), seed: int) -> list[dict[str, Any]]:
        """
        A row per arm and budget.

        `compared`: measures with the paired difference to the arm `full` beside them, as `..._minus_full`.
        """
        return [self._row(arm, budget, compared, seed) for arm, budget in self._figures]

    def _row(self, arm: str, budget: float, compared: Sequence[str], seed: int) -> dict[str, Any]:
        own = {name: np.array(values) for name, values in self._figures[arm, budget].items()}
        n = max(len(values) for values in own.values())
        row: dict[str, Any] = {"data": self.data, "task": self.task, "arm": arm, "budget": budget or None}
        row = {name: value for name, value in row.items() if value is not None}
        row |= {"n": n, "skipped": self.skipped}
        for name, values in own.items():
            summary = _SUMMARIES.get(name, mean)
            row[name] = interval(summary, values, seed=seed)
            full = np.array(self._figures.get(("full", 0.0), {}).get(name, []))
            if name in compared and arm != "full" and len(full) == len(values):
                row[f"{name}_minus_full"] = interval(summary, values, full, seed=seed)
        return row
