"""JSON-ready entries of answers: a prompt, its edits, its pieces of KV, and whose it is."""

from __future__ import annotations

import time
from collections import Counter

from delta_tree import DeltaTree, EditScript, Node, Op, SegmentId
from kvshare.admin.documents import EditDocument, EditsDocument, NodeSummary, PieceDocument
from kvshare.tenants import Tenants


def tenant_of(tenants: Tenants, namespace: str) -> str | None:
    owner = tenants.owner_of(namespace)
    return None if owner is None else owner.tenant


def summary_of(tree: DeltaTree, tenants: Tenants, node: Node) -> NodeSummary:
    now = time.time()
    return {
        "id": node.node_id,
        "namespace": node.namespace,
        "tenant": tenant_of(tenants, node.namespace),
        "num_tokens": node.num_tokens,
        "exact_length": node.exact_length,
        "num_bytes": _num_bytes(tree, node),
        "own_bytes": tree.owned_bytes(node.node_id),
        "subtree_bytes": tree.subtree_bytes(node.node_id),
        "num_hits": node.num_hits,
        "age_s": max(now - node.created_at, 0.0),
        "idle_s": max(now - node.last_used_at, 0.0),
        "pinned": node.pinned,
    }


def _num_bytes(tree: DeltaTree, node: Node) -> int:
    """Count the KV that a node points to. A segment may be gone: the node was evicted meanwhile."""
    lengths: Counter[SegmentId] = Counter()
    for _, segment_id, _, length in node.pieces.rows():
        lengths[segment_id] += length
    found = {each: tree.segment(each) for each in lengths if tree.reference_count(each)}
    return round(
        sum(found[each].bytes_per_token * length for each, length in lengths.items() if each in found)
    )


def edits_of(script: EditScript) -> EditsDocument:
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


def piece_of(tree: DeltaTree, start: int, segment_id: SegmentId, offset: int, length: int) -> PieceDocument:
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
