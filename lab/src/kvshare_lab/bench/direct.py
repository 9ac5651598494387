"""Helpers for benchmarks that call the model without the engine: prefill by a plan, greedy answers."""

from collections.abc import Collection

import numpy as np
import torch

from delta_tree import Copy, NodeId, SegmentId, Span, TokenIds
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.plan import NoPlan, Plan

SEGMENT = SegmentId(1)  # a donor's only segment


def prefilled(
    model: EmbeddedModel, tokens: TokenIds, plan: Plan | NoPlan, kv: SequenceKV, *, max_queries: int = 512
) -> tuple[Plan | NoPlan, torch.Tensor]:
    """
    Compute what the plan does not copy, as the engine does. Its copies must be in `kv` already.

    Returns the plan with the repairs that were chosen, and the logits (V,) of the answer's first token.
    """
    prefill, logits = model.prefill(tokens, plan, kv), None
    while logits is None:
        _, logits = prefill.advance(max_queries=max_queries)
    return prefill.plan, logits


def greedy(
    model: EmbeddedModel,
    kv: SequenceKV,
    num_tokens: int,
    logits: torch.Tensor,
    *,
    limit: int,
    ends: Collection[int],
) -> tuple[list[int], list[torch.Tensor]]:
    """
    The greedy answer to a prompt of `num_tokens`: its tokens, and the logits (V,) that each was chosen from.

    It ends with a token of `ends`, or after `limit` tokens.
    """
    tokens, seen = [int(logits.argmax())], [logits]
    while len(tokens) < limit and tokens[-1] not in ends:
        seen.append(model.next_logits(kv, num_tokens + len(tokens) - 1, tokens[-1]))
        tokens.append(int(seen[-1].argmax()))
    return tokens, seen


def compute(model: EmbeddedModel, kv: SequenceKV, runs: tuple[Span, ...], tokens: TokenIds) -> torch.Tensor:
    """One pass over these runs of a prompt. Returns the logits after each of their positions: (N, V)."""
    ids = np.concatenate([tokens[run.start : run.end] for run in runs])
    return model.logits(PartialPass(kv, runs), ids, keep=len(ids))


def scattered_runs(rng: np.random.Generator, num_tokens: int) -> list[Span]:
    """Up to 28 runs of 1 to 12 tokens, none of which touches another or the end of the prompt."""
    starts = np.unique(rng.integers(0, max(1, (num_tokens - 16) // 14), 28)) * 14
    return [Span(int(start), int(start + rng.integers(1, 13))) for start in starts]


def copied(start: int, length: int, *, target_start: int) -> Copy:
    """A copy from a donor of one segment, whose KV was computed at the donor's own positions."""
    return Copy(
        donor=NodeId(1),
        segment_id=SEGMENT,
        offset=start,
        length=length,
        target_start=target_start,
        source_position=start,
        donor_start=start,
    )
