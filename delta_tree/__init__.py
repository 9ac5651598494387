"""
How one prompt's tokens become another's, and which stored KV a new prompt can reuse.

The package has edit scripts and alignment, the tree of prompts with their piece tables, the composition of a
new prompt from stored ones, and the metadata file. It knows KV segments by their ids only: no tensors, no
HTTP, no vector index.
"""

from delta_tree.align import align as align
from delta_tree.anchors import common_runs as common_runs
from delta_tree.compose import compose as compose
from delta_tree.composition import Composition as Composition
from delta_tree.composition import Copy as Copy
from delta_tree.composition import DonorReason as DonorReason
from delta_tree.edits import Edit as Edit
from delta_tree.edits import EditScript as EditScript
from delta_tree.edits import Match as Match
from delta_tree.edits import Op as Op
from delta_tree.errors import DeltaTreeError as DeltaTreeError
from delta_tree.errors import EditRangeError as EditRangeError
from delta_tree.errors import InvalidNodeError as InvalidNodeError
from delta_tree.errors import InvalidTokensError as InvalidTokensError
from delta_tree.errors import MetadataStoreError as MetadataStoreError
from delta_tree.errors import PinnedNodeError as PinnedNodeError
from delta_tree.errors import StoreCorruptError as StoreCorruptError
from delta_tree.errors import StoreForeignError as StoreForeignError
from delta_tree.errors import StoreLockedError as StoreLockedError
from delta_tree.errors import StoreMismatchError as StoreMismatchError
from delta_tree.errors import StoreMissingError as StoreMissingError
from delta_tree.errors import StoreNotEmptyError as StoreNotEmptyError
from delta_tree.errors import StoreReadOnlyError as StoreReadOnlyError
from delta_tree.errors import StoreUnavailableError as StoreUnavailableError
from delta_tree.errors import UnknownNodeError as UnknownNodeError
from delta_tree.errors import UnknownSegmentError as UnknownSegmentError
from delta_tree.eviction_order import DEFAULT_EVICTION as DEFAULT_EVICTION
from delta_tree.eviction_order import EVICTION_QUEUES as EVICTION_QUEUES
from delta_tree.eviction_queue import EvictionQueue as EvictionQueue
from delta_tree.eviction_queue import RecencyQueue as RecencyQueue
from delta_tree.eviction_queue import Use as Use
from delta_tree.forest import TreeStats as TreeStats
from delta_tree.kgrams import kgram_hashes as kgram_hashes
from delta_tree.node import SEGMENT_TOKENS as SEGMENT_TOKENS
from delta_tree.node import UNKNOWN_DEVIATION as UNKNOWN_DEVIATION
from delta_tree.node import Eviction as Eviction
from delta_tree.node import Insertion as Insertion
from delta_tree.node import Node as Node
from delta_tree.node import NodeDraft as NodeDraft
from delta_tree.node import NodeId as NodeId
from delta_tree.node import Piece as Piece
from delta_tree.node import PieceTable as PieceTable
from delta_tree.node import Segment as Segment
from delta_tree.node import SegmentId as SegmentId
from delta_tree.node import new_segment_id as new_segment_id
from delta_tree.node import segment_tokens as segment_tokens
from delta_tree.reading import SharedKV as SharedKV
from delta_tree.runs import common_prefix_length as common_prefix_length
from delta_tree.runs import common_suffix_length as common_suffix_length
from delta_tree.spans import Span as Span
from delta_tree.spans import TokenIds as TokenIds
from delta_tree.spans import gaps as gaps
from delta_tree.spans import merge as merge
from delta_tree.spans import split as split
from delta_tree.spans import token_ids as token_ids
from delta_tree.storage import aside_path as aside_path
from delta_tree.storage import check_unlocked as check_unlocked
from delta_tree.storage import set_aside as set_aside
from delta_tree.target import Target as Target
from delta_tree.tree import DeltaTree as DeltaTree
