"""
How far an arm's answer is from the full prefill's, and from the right one.

Teacher-forced: every arm reads the same answer, the full prefill's own, so that positions can be compared.
Free-running: every arm writes its own. One different token early on gives two texts that cannot be compared
token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

import numpy as np
import torch

from delta_tree import TokenIds


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of two models of the next token, along one answer; nats."""

    kl: float  # mean over positions of KL(full || arm)
    kl_first: float  # of the first token
    top1: float  # share of positions with the same most likely token

    def as_document(self) -> dict[str, float]:
        """The fields, rounded."""
        return {name: rounded(value) for name, value in asdict(self).items()}


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
    both = min(len(full), len(found))
    num_equal = int((np.asarray(full[:both]) == np.asarray(found[:both])).sum())
    length = max(len(full), len(found), 1)
    is_equal = len(full) == len(found) == num_equal
    first = num_agreed(full.tolist(), found.tolist())
    return {"agree": rounded(num_equal / length), "first": first, "equal": int(is_equal)}


def text_scores(reference: str, found: str) -> dict[str, float]:
    """BLEU, ROUGE-L, token F1 and Jaccard of one text against another, each 0 to 1."""
    return {
        "bleu": rounded(_bleu(reference, found)),
        "rouge_l": rounded(rouge_l(reference, found)),
        "f1": rounded(token_f1(reference, found)),
        "jaccard": rounded(jaccard(reference, found)),
    }


def _bleu(reference: str, found: str) -> float:
    """Of n-grams as long as the text allows: corpus BLEU of fewer than four words is always 0."""
    from sacrebleu import sentence_bleu

    score: float = sentence_bleu(found, [reference], use_effective_order=True).score
    return min(1.0, score / 100)


def rouge_l(reference: str, found: str) -> float:
    """F-measure of the longest common subsequence of words (rouge-score)."""
    from rouge_score.rouge_scorer import RougeScorer

    score: float = RougeScorer(["rougeL"]).score(reference, found)["rougeL"].fmeasure
    return score


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
