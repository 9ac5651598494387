"""
A small family of stored prompts, without a model: KV bytes are only counted.

    root      100 tokens, computed in one go
      child   the root with tokens 40-60 replaced: owns 20 tokens of KV
        grand the child without its first 10 tokens: everything shifts, owns the last 5
    stranger  50 tokens in another namespace
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delta_tree import (
    DeltaTree,
    NodeDraft,
    NodeId,
    Piece,
    PieceTable,
    Segment,
    Span,
    TokenIds,
    new_segment_id,
    token_ids,
)

OURS = "a" * 64
THEIRS = "ab" + "b" * 62
IDENTITY = "demo:revision:tokenizer:float32"
BYTES_PER_TOKEN = 1000


@dataclass(frozen=True, slots=True)
class Family:
    """The ids of the nodes."""

    root: NodeId
    child: NodeId
    grand: NodeId
    stranger: NodeId


def grow(tree: DeltaTree) -> Family:
    """Put the family into an empty tree."""
    tokens = np.arange(910_000, 910_100)  # no other figure of a document looks like this
    changed = tokens.copy()
    changed[40:60] = np.arange(920_000, 920_020)
    shifted = np.concatenate([changed[10:95], np.arange(930_000, 930_005)])

    whole = segment(OURS, Span(0, 100))
    edit = segment(OURS, Span(40, 60))
    tail = segment(OURS, Span(85, 90), generation=1)
    root = insert(tree, OURS, token_ids(tokens), None, [Piece(whole.segment_id, 0, 100)], [whole], 100)
    kept = [Piece(whole.segment_id, 0, 40), Piece(edit.segment_id, 0, 20), Piece(whole.segment_id, 60, 40)]
    child = insert(tree, OURS, token_ids(changed), root, kept, [edit], 60)
    moved = [
        Piece(whole.segment_id, 10, 30),
        Piece(edit.segment_id, 0, 20),
        Piece(whole.segment_id, 60, 35),
        Piece(tail.segment_id, 0, 5),
    ]
    grand = insert(tree, OURS, token_ids(shifted), child, moved, [tail], 0)
    other = segment(THEIRS, Span(0, 50))
    piece = [Piece(other.segment_id, 0, 50)]
    stranger = insert(tree, THEIRS, token_ids(np.arange(910_000, 910_050)), None, piece, [other], 50)
    return Family(root, child, grand, stranger)


def write_store(folder: Path) -> Family:
    """A stopped server's metadata in `folder`."""
    tree = DeltaTree.open(folder / "tree.sqlite3", identity=IDENTITY)
    try:
        return grow(tree)
    finally:
        tree.close()


def segment(namespace: str, span: Span, *, generation: int = 0) -> Segment:
    """KV of a span that was computed where it stands."""
    return Segment(
        segment_id=new_segment_id(),
        namespace=namespace,
        first_position=span.start,
        num_tokens=len(span),
        generation=generation,
        num_bytes=BYTES_PER_TOKEN * len(span),
        checksum=0,
    )


def insert(
    tree: DeltaTree,
    namespace: str,
    tokens: TokenIds,
    parent: NodeId | None,
    pieces: Sequence[Piece],
    segments: Sequence[Segment],
    exact_length: int,
) -> NodeId:
    """Store a prompt; its id."""
    draft = NodeDraft(namespace, tokens, parent, PieceTable(pieces), tuple(segments), exact_length)
    return tree.insert(draft).node.node_id
