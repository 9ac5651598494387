"""Whether an answer is the reference's, token for token, but for choices that were as good as even."""

from __future__ import annotations

from dataclasses import dataclass

from kvshare.bench.vllm.client import Answer

MAX_TIE_MARGIN = 1e-3  # log-probability between first and second choice; other batches round otherwise


@dataclass(frozen=True, slots=True)
class Verdict:
    """`name`: right, tied or wrong. `agreement`: share of the answer's tokens before the first difference."""

    name: str
    agreement: float
    first_difference: int | None = None
    margin: float | None = None  # of the reference, where they part
    logprob_error: float = 0.0  # largest, over the tokens before


def judge(answer: Answer, reference: Answer, *, aborted: bool = False) -> Verdict:
    """Compare with a full reference. An aborted answer must be its beginning."""
    found, expected = answer.token_ids, reference.token_ids
    common = min(len(found), len(expected))
    parted = next((place for place in range(common) if found[place] != expected[place]), None)
    same = common if parted is None else parted
    pairs = zip(answer.logprobs[:same], reference.logprobs[:same], strict=True)
    error = max((abs(one - other) for one, other in pairs), default=0.0)
    if parted is not None:
        margin = reference.margins[parted]
        name = "tied" if margin < MAX_TIE_MARGIN else "wrong"
        return Verdict(name, parted / len(found), parted, margin, error)
    if len(found) == len(expected) or (aborted and len(found) < len(expected)):
        return Verdict("right", 1.0, logprob_error=error)
    return Verdict("wrong", common / max(1, len(found)), common, None, error)
