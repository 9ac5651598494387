"""
How far an arm's answer is from the full prefill's, and from the right one.

Teacher-forced: every arm reads the same answer, the full prefill's own, so that positions can be compared.
Free-running: every arm writes its own; one other token early on makes two texts that cannot be compared
token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from delta_tree import TokenIds, token_ids
from kvshare.bench.fidelity.layered import LayeredModel, Pass
from kvshare.kv.sequence import SequenceKV


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of two models of the next token, along one answer; nats."""

    kl: float  # mean over positions of KL(full || arm)
    kl_first: float  # of the first token
    top1: float  # share of positions with the same most likely token

    def as_document(self) -> dict[str, float]:
        return {"kl": rounded(self.kl), "kl_first": rounded(self.kl_first), "top1": rounded(self.top1)}


def divergence(truth: torch.Tensor, found: torch.Tensor) -> Divergence:
    """Shapes: (F, V) log-probabilities of the full prefill and of an arm."""
    exact, other = truth.double(), found.double()
    kl = (exact.exp() * (exact - other)).sum(dim=-1).clamp(min=0.0)
    same = truth.argmax(dim=-1) == found.argmax(dim=-1)
    return Divergence(float(kl.mean()), float(kl[0]), float(same.double().mean()))


def margin(scores: Sequence[float]) -> float:
    """Nats a token by which the right candidate, the first, leads the best other one."""
    return scores[0] - max(scores[1:])


def rounded(value: float) -> float:
    """Five digits: what a figure is worth, and no more bytes than that."""
    return float(f"{value:.5g}")


def free_running(
    model: LayeredModel, kv: SequenceKV, first: torch.Tensor, *, num_tokens: int, limit: int
) -> TokenIds:
    """
    The greedy answer behind a prompt of `num_tokens` whose KV stands in `kv`, at most `limit` tokens.

    `first`: (V,) log-probabilities of its first token.
    """
    eos = model.model.eos_token_ids(None)
    kv, last = kv.fork(num_tokens), first
    kv.reserve(num_tokens + limit)
    found: list[int] = []
    while len(found) < limit:
        found.append(int(last.argmax()))
        if found[-1] in eos or len(found) == limit:
            break
        slot = np.array([num_tokens + len(found) - 1])
        last = model.run(kv, Pass(token_ids(found[-1:]), slot), logits_of=np.array([0]))[0]
    return token_ids(found)


def num_agreed(full: Sequence[object], found: Sequence[object]) -> int:
    """Tokens in front of the first that differs."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(full, found, strict=False)))


def agreement(full: TokenIds, found: TokenIds) -> dict[str, float | int]:
    """Share of equal tokens place by place, where they part (their length if never), whether equal."""
    length = max(len(full), len(found), 1)
    both = min(len(full), len(found))
    equal = np.asarray(full[:both]) == np.asarray(found[:both])
    first = both if equal.all() else int(np.argmin(equal))
    is_equal = len(full) == len(found) and bool(equal.all())
    return {"agree": rounded(float(equal.sum()) / length), "first": first, "equal": int(is_equal)}


def text_scores(reference: str, found: str) -> dict[str, float]:
    """BLEU (0 to 1), ROUGE-L, token F1 and Jaccard of one text against another."""
    return {
        "bleu": rounded(_bleu_of_one(reference, found)),
        "rouge_l": rounded(rouge_l(reference, found)),
        "f1": rounded(token_f1(reference, found)),
        "jaccard": rounded(jaccard(reference, found)),
    }


def bleu(references: Sequence[str], found: Sequence[str], *, tokenize: str = "13a") -> float:
    """Corpus BLEU, 0 to 1 (sacrebleu); `tokenize` "zh" for Chinese."""
    from sacrebleu import corpus_bleu

    score: float = corpus_bleu(list(found), [list(references)], tokenize=tokenize).score
    return score / 100


def _bleu_of_one(reference: str, found: str) -> float:
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
    """F1 of words, as question answering counts them."""
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
