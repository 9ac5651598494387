"""Aligning by anchors copies no fewer tokens of the six workloads than looking at each place does."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pytest

from delta_tree import (
    DeltaTree,
    Node,
    NodeDraft,
    Piece,
    PieceTable,
    Segment,
    TokenIds,
    anchors,
    new_segment_id,
)
from delta_tree import token_ids as as_token_ids
from delta_tree.kgrams import kgram_hashes
from kvshare.replay.workloads import WORKLOADS, generate
from kvshare.settings import load_settings
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import Rates

NUM = 60
SETTINGS = load_settings()
MIN_RUN = SETTINGS.sharing.min_run
LIMITS = PlannerLimits(sharing=SETTINGS.sharing, repair=SETTINGS.repair)
RATES = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e9, bytes_per_token=1000)
_NEVER = 2**30  # tokens: every prompt goes the way of the short ones


def prompts(name: str) -> list[TokenIds]:
    """The workload from its sample, one token a word or sign."""
    numbers: defaultdict[str, int] = defaultdict(lambda: len(numbers))
    return [
        as_token_ids(
            [
                numbers[word]
                for message in row.messages
                for word in re.findall(r"\w+|[^\w\s]|\s+", f"{message['role']}: {message['content']}")
            ]
        )
        for row in generate(name, (), num_requests=NUM, seed=1)
    ]


def stored(tree: DeltaTree, tokens: TokenIds) -> Node:
    """A prompt that was computed in full."""
    segment = Segment(new_segment_id(), "ns", 0, len(tokens), 0, len(tokens), 0)
    pieces = PieceTable([Piece(segment.segment_id, 0, len(tokens))])
    return tree.insert(NodeDraft("ns", tokens, None, pieces, (segment,), len(tokens))).node


def num_copied(tree: DeltaTree, tokens: TokenIds, donors: list[Node]) -> int:
    plan = make_plan(tokens, donors, tree.segment, approximate=True, limits=LIMITS, rates=RATES)
    return 0 if isinstance(plan, NoPlan) else plan.num_tokens - plan.num_computed


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_fewer_tokens_are_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never fewer in sum, and never fewer by more than `min_run` for one request."""
    tree = DeltaTree.open(None, identity="test")
    nodes: list[Node] = []
    kgrams: list[set[int]] = []
    sums = np.zeros(2, dtype=np.int64)
    for tokens in prompts(name):
        own = set(kgram_hashes(tokens, 8).tolist())
        order = sorted(range(len(nodes)), key=lambda i: -len(own & kgrams[i]))
        donors = [nodes[i] for i in order[: SETTINGS.index.max_candidates]]
        copied = []
        for min_anchored in (0, _NEVER):
            monkeypatch.setattr(anchors, "_MIN_ANCHORED", min_anchored)
            copied.append(num_copied(tree, tokens, donors))
        assert copied[0] >= copied[1] - MIN_RUN
        sums += copied
        node = stored(tree, tokens)
        if node not in nodes:
            nodes.append(node)
            kgrams.append(own)
    assert sums[0] >= sums[1] > 0
