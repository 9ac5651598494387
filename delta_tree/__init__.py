"""
How one prompt's tokens become another's, and which stored KV a new prompt can reuse.

The package has edit scripts and alignment, the tree of prompts with their piece tables, the composition of a
new prompt from stored ones, and the metadata file. It knows KV segments by their ids only: no tensors, no
HTTP, no vector index.
"""

from delta_tree.align import align, common_suffix_length
from delta_tree.anchors import common_runs
from delta_tree.change import Eviction, Insertion
from delta_tree.compose import compose
from delta_tree.composition import Composition, Copy, DonorReason
from delta_tree.edits import Edit, EditScript, Match, Op
from delta_tree.errors import (
    DeltaTreeError,
    EditRangeError,
    InvalidNodeError,
    InvalidTokensError,
    PinnedNodeError,
    StoreCorruptError,
    StoreError,
    StoreForeignError,
    StoreLockedError,
    StoreMismatchError,
    StoreMissingError,
    StoreReadOnlyError,
    StoreUnavailableError,
    UnknownNodeError,
    UnknownSegmentError,
)
from delta_tree.kgrams import kgram_hashes
from delta_tree.node import (
    SEGMENT_TOKENS,
    UNKNOWN_DEVIATION,
    Node,
    NodeDraft,
    NodeId,
    Segment,
    SegmentId,
    new_segment_id,
    segment_tokens,
)
from delta_tree.pieces import Piece, PieceTable
from delta_tree.reading import SharedKV
from delta_tree.runs import common_prefix_length
from delta_tree.spans import Span, TokenIds, gaps, merge, split, token_ids
from delta_tree.store_files import check_unlocked, set_aside
from delta_tree.totals import TreeStats
from delta_tree.tree import DeltaTree

__all__ = [
    "SEGMENT_TOKENS",
    "UNKNOWN_DEVIATION",
    "Composition",
    "Copy",
    "DeltaTree",
    "DeltaTreeError",
    "DonorReason",
    "Edit",
    "EditRangeError",
    "EditScript",
    "Eviction",
    "Insertion",
    "InvalidNodeError",
    "InvalidTokensError",
    "Match",
    "Node",
    "NodeDraft",
    "NodeId",
    "Op",
    "Piece",
    "PieceTable",
    "PinnedNodeError",
    "Segment",
    "SegmentId",
    "SharedKV",
    "Span",
    "StoreCorruptError",
    "StoreError",
    "StoreForeignError",
    "StoreLockedError",
    "StoreMismatchError",
    "StoreMissingError",
    "StoreReadOnlyError",
    "StoreUnavailableError",
    "TokenIds",
    "TreeStats",
    "UnknownNodeError",
    "UnknownSegmentError",
    "align",
    "check_unlocked",
    "common_prefix_length",
    "common_runs",
    "common_suffix_length",
    "compose",
    "gaps",
    "kgram_hashes",
    "merge",
    "new_segment_id",
    "segment_tokens",
    "set_aside",
    "split",
    "token_ids",
]
