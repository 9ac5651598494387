"""
The questions. Some only look: what is stored, how prompts hang together, what differs between two. The others
change the store: evict, pin, unpin.
"""

import time
from collections.abc import Collection
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from delta_tree import (
    DeltaTree,
    EditScript,
    Eviction,
    Node,
    Op,
    PinnedNodeError,
    SegmentId,
    UnknownNodeError,
    UnknownSegmentError,
    align,
)
from kvshare.admin.question import Answer, namespace_of, node_of, not_found, question
from kvshare.errors import ErrorCode, RequestError
from kvshare.query_arguments import Digest, Flag, Number

_SORTED_BY = {"bytes": "subtree_bytes", "hits": "num_hits", "age": "age_s", "tokens": "num_tokens"}
_MIN_RUN = 16  # of the edits from a parent: shorter matches are accidental
_MAX_DEPTH = 64  # of the document; the tree may be deeper, and `root` starts further down


@question
def stats(tree: DeltaTree, /, *, namespace: Digest | None = None) -> Answer:
    """How much is stored, in all and per namespace."""
    chosen = namespace_of(tree, namespace)
    digests = sorted({node.namespace for node in tree.nodes()}) if chosen is None else [chosen]
    rows = [{"namespace": digest, **asdict(tree.stats(digest))} for digest in digests]
    return Answer({"totals": asdict(tree.stats(chosen)), "namespaces": rows})


@question
def tree(
    tree: DeltaTree,
    /,
    *,
    root: Number | None = None,
    namespace: Digest | None = None,
    depth: Annotated[Number, Field(le=_MAX_DEPTH)] = 4,
    sort: Literal["bytes", "hits", "age", "tokens"] = "bytes",
) -> Answer:
    """Prompts below their parents, `depth` levels of them; of siblings, those that have most come first."""
    now = time.time()

    def branches(nodes: Collection[Node], levels: int) -> list[dict[str, Any]]:
        if not levels:
            return []
        entries = []
        for node in nodes:
            try:
                children = [tree.node(child) for child in tree.children(node.node_id)]
                entry = {**_summary(tree, node, now), "num_children": len(children)}
            except UnknownNodeError:
                continue  # evicted since we began; a running server does not wait for us
            entries.append({**entry, "children": branches(children, levels - 1)})
        return sorted(entries, key=lambda entry: -entry[_SORTED_BY[sort]])

    chosen = namespace_of(tree, namespace)
    if root is None:
        roots = [node for node in tree.nodes(chosen) if not tree.ancestors(node.node_id)]
    else:
        found = node_of(tree, "root", root)
        roots = [found] if chosen in (None, found.namespace) else []
    return Answer({"depth": depth, "roots": branches(roots, depth)})


@question
def node(tree: DeltaTree, /, *, id: Number) -> Answer:
    """One prompt: its parents, its edits, its pieces of KV, and the prompts that share them."""
    found = node_of(tree, "id", id)
    try:
        parents, shared_with = tree.ancestors(found.node_id), tree.shared_with(found.node_id)
        origin = tree.node(parents[0]) if parents else found
        script = align(origin.token_ids, found.token_ids, min_run=_MIN_RUN)
        document = {
            **_summary(tree, found, time.time()),
            "parents": list(parents),
            "children": list(tree.children(found.node_id)),
            "edits": _edits(script) if parents else None,
            "pieces": [_piece(tree, *row) for row in found.pieces.rows()],
            "shared_with": [{"id": other.node_id, "num_tokens": other.num_tokens} for other in shared_with],
        }
    except (UnknownNodeError, UnknownSegmentError) as exc:  # evicted since we began
        raise not_found("id", found.node_id) from exc
    return Answer(document)


@question
def diff(tree: DeltaTree, /, *, a: Number, b: Number, min_run: Number = 1) -> Answer:
    """The token-level edits from prompt `a` to `b` of one namespace; a match below `min_run` is a change."""
    source, target = node_of(tree, "a", a), node_of(tree, "b", b)
    if source.namespace != target.namespace:
        raise RequestError(
            "b: expected a node of the same namespace as a", param="b", code=ErrorCode.NAMESPACE_MISMATCH
        )
    script = align(source.token_ids, target.token_ids, min_run=min_run)
    prefix = next((keep.length for keep in script.keeps if keep.source == keep.target == 0), 0)
    document = {
        "a": a,
        "b": b,
        "namespace": source.namespace,
        "num_common_prefix": prefix,
        "kept_share_of_a": script.num_kept / source.num_tokens,
        "kept_share_of_b": script.num_kept / target.num_tokens,
        "edits": _edits(script),
    }
    return Answer(document)


@question
def evict(
    tree: DeltaTree,
    /,
    *,
    node: Number | None = None,
    namespace: Digest | None = None,
    all: Flag = False,
    dry_run: Flag | None = None,
) -> Answer:
    """
    Evict one prompt, or purge a namespace or everything, pinned prompts too. KV that others need stays.

    Exactly one of `node`, `namespace` and `all`. `dry_run` is false by default for `node`, else true.
    """
    _check_one_of(node=node, namespace=namespace, all=all or None)
    if node is not None:
        return _evict_node(tree, node_of(tree, "node", node), dry_run=bool(dry_run))
    chosen = namespace_of(tree, namespace)
    nodes = tree.nodes(chosen)
    if dry_run is False:
        return _evicted(nodes, tree.purge_all() if chosen is None else tree.purge(chosen), dry_run)
    segments = tuple(segment.segment_id for segment in tree.segments(chosen))
    return _evicted(nodes, Eviction(len(nodes), segments, tree.stats(chosen).num_bytes), dry_run=True)


@question
def pin(tree: DeltaTree, /, *, node: Number | None = None, namespace: Digest | None = None) -> Answer:
    """Protect one prompt from eviction, or all that a namespace has now; exactly one of the two."""
    _check_one_of(node=node, namespace=namespace)
    nodes = _one_or_all(tree, node, namespace)
    return Answer(_pinned(tree, nodes), to_pin=tuple(entry.node_id for entry in nodes))


@question
def unpin(
    tree: DeltaTree, /, *, node: Number | None = None, namespace: Digest | None = None, all: Flag = False
) -> Answer:
    """Allow eviction again: of one prompt, those of a namespace, or all; exactly one of the three."""
    _check_one_of(node=node, namespace=namespace, all=all or None)
    nodes = [entry for entry in _one_or_all(tree, node, namespace) if entry.pinned]
    tree.unpin(*(entry.node_id for entry in nodes))
    return Answer(_pinned(tree, nodes))


def _summary(tree: DeltaTree, node: Node, now: float) -> dict[str, Any]:
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


def _edits(script: EditScript) -> dict[str, Any]:
    """Spans [start, end) in both prompts; counts in tokens of the target, for deletes of the source."""
    counts = dict.fromkeys((op.value for op in Op), 0)
    ops = []
    for edit in script.edits:
        source, target = edit.source, edit.target
        counts[edit.op.value] += len(source if edit.op is Op.DELETE else target)
        ends = {"source": [source.start, source.end], "target": [target.start, target.end]}
        ops.append({"op": edit.op.value, **ends})
    return {"counts": counts, "ops": ops}


def _piece(tree: DeltaTree, start: int, segment_id: SegmentId, offset: int, length: int) -> dict[str, Any]:
    """Where the KV of a stretch lies; a shift is how far it is from where it was computed."""
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


def _check_one_of(**given: object) -> None:
    """Raises RequestError unless exactly one of the arguments is given."""
    if sum(value is not None for value in given.values()) != 1:
        *names, last = ("all=true" if name == "all" else name for name in given)
        raise RequestError(f"node: expected exactly one of {', '.join(names)} and {last}", param="node")


def _one_or_all(tree: DeltaTree, node_id: int | None, namespace: str | None) -> Collection[Node]:
    return tree.nodes(namespace_of(tree, namespace)) if node_id is None else (node_of(tree, "node", node_id),)


def _pinned(tree: DeltaTree, nodes: Collection[Node]) -> dict[str, Any]:
    """How many prompts, and the KV that they point to; some of it may be other prompts' as well."""
    segments = {segment_id for entry in nodes for segment_id in entry.pieces.segment_ids}
    num_bytes = sum(tree.segment(segment_id).num_bytes for segment_id in segments)
    return {"num_nodes": len(nodes), "num_bytes": num_bytes}


def _evict_node(tree: DeltaTree, node: Node, *, dry_run: bool) -> Answer:
    try:
        if node.pinned:
            raise PinnedNodeError(node.node_id)
        if dry_run:
            owned = tuple(piece for piece in node.pieces.segment_ids if tree.reference_count(piece) == 1)
            gone = Eviction(1, owned, tree.owned_bytes(node.node_id))
        else:
            gone = tree.evict(node.node_id)
    except PinnedNodeError as exc:
        raise RequestError(f"node: {exc}", param="node", code=ErrorCode.NODE_PINNED) from exc
    except UnknownNodeError as exc:
        raise not_found("node", node.node_id) from exc
    return _evicted([node], gone, dry_run)


def _evicted(nodes: Collection[Node], gone: Eviction, dry_run: bool) -> Answer:
    document = {
        "dry_run": dry_run,
        "num_nodes": gone.num_nodes,
        "num_segments": len(gone.freed_segments),
        "freed_bytes": gone.freed_bytes,
    }
    removed = () if dry_run else tuple((node.namespace, node.node_id) for node in nodes)
    return Answer(document, () if dry_run else gone.freed_segments, removed)
