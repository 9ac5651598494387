"""
What an administrator may ask of a store: how much it holds, how prompts hang together, what differs between
two. A question changes nothing; see `kvshare.admin.commands` for what does.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Field

from delta_tree import (
    DeltaTree,
    EditScript,
    Node,
    Op,
    SegmentId,
    TreeStats,
    UnknownNodeError,
    UnknownSegmentError,
    align,
)
from kvshare.admin.arguments import STRICT, Digest, Number, namespace_of, node_of, not_found
from kvshare.admin.documents import (
    DiffDocument,
    EditDocument,
    EditsDocument,
    NodeDocument,
    NodeSummary,
    PieceDocument,
    StoredTotals,
    StoreStats,
    TreeDocument,
    TreeEntry,
)
from kvshare.errors import ErrorCode, RequestError

TreeOrder = Literal["bytes", "hits", "age", "tokens"]
DocumentT_co = TypeVar("DocumentT_co", covariant=True)

_MIN_RUN = 16  # of the edits from a parent: shorter matches are accidental
_MAX_DEPTH = 64  # of the document; the tree may be deeper, and `root` starts further down


class StoreQuestion(Protocol[DocumentT_co]):
    """Any of the questions below."""

    def answer(self, tree: DeltaTree) -> DocumentT_co: ...


@dataclass(frozen=True, slots=True)
class StatsQuestion:
    """How much is stored, in all and per namespace."""

    __pydantic_config__ = STRICT
    namespace: Digest | None = None

    def answer(self, tree: DeltaTree) -> StoreStats:
        chosen = namespace_of(tree, self.namespace)
        digests = sorted({node.namespace for node in tree.nodes()}) if chosen is None else [chosen]
        return {
            "totals": _totals(tree.stats(chosen)),
            "namespaces": [{"namespace": digest, **_totals(tree.stats(digest))} for digest in digests],
        }


@dataclass(frozen=True, slots=True)
class TreeQuestion:
    """Prompts below their parents, `depth` levels of them; of siblings, those that have most come first."""

    __pydantic_config__ = STRICT
    root: Number | None = None
    namespace: Digest | None = None
    depth: Annotated[Number, Field(le=_MAX_DEPTH)] = 4
    sort: TreeOrder = "bytes"

    def answer(self, tree: DeltaTree) -> TreeDocument:
        chosen = namespace_of(tree, self.namespace)
        if self.root is None:
            roots = [node for node in tree.nodes(chosen) if not tree.ancestors(node.node_id)]
        else:
            node = node_of(tree, "root", self.root)
            roots = [node] if chosen in (None, node.namespace) else []
        return {"depth": self.depth, "roots": self._branches(tree, roots, self.depth, time.time())}

    def _branches(self, tree: DeltaTree, nodes: Collection[Node], levels: int, now: float) -> list[TreeEntry]:
        if not levels:
            return []
        entries: list[TreeEntry] = []
        for node in nodes:
            try:
                children = [tree.node(child) for child in tree.children(node.node_id)]
                summary = _summary(tree, node, now)
            except UnknownNodeError:
                continue  # evicted since we began; a running server does not wait for us
            below = self._branches(tree, children, levels - 1, now)
            entries.append({**summary, "num_children": len(children), "children": below})
        return sorted(entries, key=self._weight, reverse=True)

    def _weight(self, entry: TreeEntry) -> float:
        """What siblings are sorted by."""
        match self.sort:
            case "bytes":
                return entry["subtree_bytes"]
            case "hits":
                return entry["num_hits"]
            case "age":
                return entry["age_s"]
            case "tokens":
                return entry["num_tokens"]


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """One prompt: its parents, its edits, its pieces of KV, and the prompts that share them."""

    __pydantic_config__ = STRICT
    id: Number

    def answer(self, tree: DeltaTree) -> NodeDocument:
        node = node_of(tree, "id", self.id)
        try:
            parents, shared_with = tree.ancestors(node.node_id), tree.shared_with(node.node_id)
            origin = tree.node(parents[0]) if parents else node
            script = align(origin.token_ids, node.token_ids, min_run=_MIN_RUN)
            return {
                **_summary(tree, node, time.time()),
                "parents": list(parents),
                "children": list(tree.children(node.node_id)),
                "edits": _edits(script) if parents else None,
                "pieces": [_piece(tree, *row) for row in node.pieces.rows()],
                "shared_with": [{"id": each.node_id, "num_tokens": each.num_tokens} for each in shared_with],
            }
        except (UnknownNodeError, UnknownSegmentError) as exc:  # evicted since we began
            raise not_found("id", node.node_id) from exc


@dataclass(frozen=True, slots=True)
class DiffQuestion:
    """The token-level edits from prompt `a` to `b` of one namespace; a match below `min_run` is a change."""

    __pydantic_config__ = STRICT
    a: Number
    b: Number
    min_run: Number = 1

    def answer(self, tree: DeltaTree) -> DiffDocument:
        source, target = node_of(tree, "a", self.a), node_of(tree, "b", self.b)
        if source.namespace != target.namespace:
            raise RequestError(
                "b: expected a node of the same namespace as a", param="b", code=ErrorCode.NAMESPACE_MISMATCH
            )
        script = align(source.token_ids, target.token_ids, min_run=self.min_run)
        prefix = next((keep.length for keep in script.keeps if keep.source == keep.target == 0), 0)
        return {
            "a": self.a,
            "b": self.b,
            "namespace": source.namespace,
            "num_common_prefix": prefix,
            "kept_share_of_a": script.num_kept / source.num_tokens,
            "kept_share_of_b": script.num_kept / target.num_tokens,
            "edits": _edits(script),
        }


def _totals(stats: TreeStats) -> StoredTotals:
    return {
        "num_nodes": stats.num_nodes,
        "num_roots": stats.num_roots,
        "num_pinned": stats.num_pinned,
        "num_segments": stats.num_segments,
        "num_tokens": stats.num_tokens,
        "num_stored_tokens": stats.num_stored_tokens,
        "num_bytes": stats.num_bytes,
        "max_depth": stats.max_depth,
    }


def _summary(tree: DeltaTree, node: Node, now: float) -> NodeSummary:
    return {
        "id": node.node_id,
        "namespace": node.namespace,
        "num_tokens": node.num_tokens,
        "exact_length": node.exact_length,
        "own_bytes": tree.owned_bytes(node.node_id),
        "subtree_bytes": tree.subtree_bytes(node.node_id),
        "num_hits": node.num_hits,
        "age_s": max(now - node.created_at, 0.0),
        "idle_s": max(now - node.last_used_at, 0.0),
        "pinned": node.pinned,
    }


def _edits(script: EditScript) -> EditsDocument:
    counts = dict.fromkeys((op.value for op in Op), 0)
    ops: list[EditDocument] = []
    for edit in script.edits:
        source, target = edit.source, edit.target
        counts[edit.op.value] += len(source if edit.op is Op.DELETE else target)
        ops.append(
            {
                "op": edit.op.value,
                "source": [source.start, source.end],
                "target": [target.start, target.end],
            }
        )
    return {"counts": counts, "ops": ops}


def _piece(tree: DeltaTree, start: int, segment_id: SegmentId, offset: int, length: int) -> PieceDocument:
    segment = tree.segment(segment_id)
    return {
        "start": start,
        "end": start + length,
        "segment": f"{segment_id:016x}",
        "offset": offset,
        "shift": start - (segment.first_position + offset),
        "generation": segment.generation,
        "num_references": tree.reference_count(segment_id),
        "num_bytes": round(segment.bytes_per_token * length),
    }
