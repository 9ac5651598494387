"""Random prompts, edits of them, and nodes that hold their KV."""

import numpy as np

from delta_tree import (
    DeltaTree,
    Node,
    NodeDraft,
    Piece,
    PieceTable,
    Segment,
    TokenIds,
    new_segment_id,
    token_ids,
)
from kvshare.sharing.rates import Rates

RATES = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e9, bytes_per_token=1000)


def prompt(length: int, seed: int = 0) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(0, 30000, length))


def replaced(tokens: TokenIds, *spans: tuple[int, int], seed: int = 99) -> TokenIds:
    changed = np.array(tokens)
    for start, end in spans:
        changed[start:end] = np.random.default_rng(seed).integers(40000, 50000, end - start)
    return token_ids(changed)


def stored(tree: DeltaTree, tokens: TokenIds, *, generation: int = 0, namespace: str = "ns") -> Node:
    """A node whose KV is one segment of its own."""
    exact = len(tokens) if generation == 0 else 0
    segment = Segment(new_segment_id(), namespace, 0, len(tokens), generation, len(tokens), 0)
    pieces = PieceTable([Piece(segment.segment_id, 0, len(tokens))])
    return tree.insert(NodeDraft(namespace, tokens, None, pieces, (segment,), exact)).node
