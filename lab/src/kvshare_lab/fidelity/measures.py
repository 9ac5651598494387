"""
How far an arm's answer is from the full prefill's, and from the right one.

Teacher-forced: every arm reads the same answer, the full prefill's own, so that positions can be compared.
Free-running: every arm writes its own. One different token early on gives two texts that cannot be compared
token by token. The papers' tables compare answers with accepted ones; their BLEU is that of a corpus.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import TokenIds

_ORDER = 4  # of BLEU's n-grams
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Figures = NDArray[np.float64]


class Divergence(NamedTuple):
    """Of two models of the next token, along one answer; nats."""

    kl: float  # mean over positions of KL(full || arm)
    kl_first: float  # of the first token
    top1: float  # share of positions with the same most likely token

    def as_document(self) -> dict[str, float]:
        return {name: rounded(value) for name, value in self._asdict().items()}


def divergence(truth: torch.Tensor, found: torch.Tensor) -> Divergence:
    """Shapes: (F, V) log-probabilities of the full prefill and of an arm."""
    exact, other = truth.double(), found.double()
    kl = (exact.exp() * (exact - other)).sum(dim=-1).clamp(min=0.0)
    same = truth.argmax(dim=-1) == found.argmax(dim=-1)
    return Divergence(float(kl.mean()), float(kl[0]), float(same.double().mean()))


def margin(scores: Sequence[float]) -> float:
    """Nats per token by which the right candidate, the first, leads the best wrong one."""
    return scores[0] - max(scores[1:])


def rounded(value: float) -> float:
    """To five significant digits: no figure here is known better."""
    return float(f"{value:.5g}")


def num_agreed(full: Sequence[object], found: Sequence[object]) -> int:
    """Tokens before the first that differs."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(full, found, strict=False)))


def agreement(full: TokenIds, found: TokenIds) -> dict[str, float | int]:
    """Share of equal tokens position by position, tokens before the first that differs, and 1 if equal."""
    num_equal = sum(one == other for one, other in zip(full.tolist(), found.tolist(), strict=False))
    length = max(len(full), len(found), 1)
    is_equal = len(full) == len(found) == num_equal
    first = num_agreed(full.tolist(), found.tolist())
    return {"agree": rounded(num_equal / length), "first": first, "equal": int(is_equal)}


def text_scores(reference: str, found: str) -> dict[str, float]:
    """BLEU, ROUGE-L, token F1 and Jaccard of one text against another, each 0 to 1."""
    measures = {"bleu": _sentence_bleu, "rouge_l": _rouge_l, "f1": token_f1, "jaccard": jaccard}
    return {name: rounded(measure(reference, found)) for name, measure in measures.items()}


def _sentence_bleu(reference: str, found: str) -> float:
    """Of n-grams as long as the text allows: corpus BLEU of fewer than four words is always 0."""
    return min(1.0, float(_bleu("13a").sentence_score(found, [reference]).score) / 100)


def _rouge_l(reference: str, found: str) -> float:
    """F-measure of the longest common subsequence of words (rouge-score)."""
    from rouge_score.rouge_scorer import RougeScorer

    score: float = RougeScorer(["rougeL"]).score(reference, found)["rougeL"].fmeasure
    return score


def rouge_l(reference: str, found: str) -> float:
    """The same, but 1 for equal texts, also for two without words."""
    return 1.0 if reference == found else _rouge_l(reference, found)


def token_f1(reference: str, found: str) -> float:
    """F1 of words, as in question answering."""
    wanted, given = Counter(reference.lower().split()), Counter(found.lower().split())
    common = (wanted & given).total()
    if not common:
        return float(wanted == given)
    precision, recall = common / given.total(), common / wanted.total()
    return 2 * precision * recall / (precision + recall)


def jaccard(reference: str, found: str) -> float:
    """Of the sets of words (Cache-Craft, figure 21)."""
    wanted, given = set(reference.lower().split()), set(found.lower().split())
    return len(wanted & given) / len(wanted | given) if wanted | given else 1.0


def plain(text: str) -> str:
    """Lower case, without punctuation and articles, as question answering compares texts."""
    letters = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return " ".join(_ARTICLES.sub(" ", letters).split())


def best(measure: Callable[[str, str], float], references: Sequence[str], found: str) -> float:
    """A measure of words against the accepted answer that fits best."""
    return max(measure(plain(reference), plain(found)) for reference in references)


def bleu_counts(reference: str, found: str, *, language: str) -> Figures:
    """(10,) n-gram matches and n-grams of each order, lengths of answer and reference."""
    score = _bleu("zh" if language == "zh" else "13a").sentence_score(found, [reference])
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)


@cache
def _bleu(tokenize: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=tokenize, effective_order=True)


def corpus_bleu(counts: Figures) -> Figures:
    """
    BLEU of corpora, 0 to 1, as sacrebleu computes it: counts are summed, zeros smoothed.

    Shapes:  (R, n, 10), n answers' `bleu_counts` in each of R corpora -> (R,)
    """
    found = []
    for total in counts.sum(axis=1).astype(int).tolist():
        matches, ngrams, (length, wanted) = total[:_ORDER], total[_ORDER : 2 * _ORDER], total[2 * _ORDER :]
        score = _bleu("13a").compute_bleu(matches, ngrams, length, wanted, smooth_method="exp").score
        found.append(score / 100)
    return np.array(found)
