"""
An operator's questions to the store, answered as JSON-ready documents.

Functions over a `DeltaTree`, asked by the server's admin routes and by `kvshare tree` and its kin on a
stopped store. All but `evict` only look. Documents carry spans and counts, no token ids. Segment ids go out
as 16 hex digits: they do not fit a JSON number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from delta_tree import (
    DeltaTree,
    EditScript,
    Eviction,
    Node,
    NodeId,
    Op,
    PinnedNodeError,
    SegmentId,
    UnknownNodeError,
    UnknownSegmentError,
    align,
)
from kvshare.errors import RequestError
from kvshare.query_arguments import QueryArguments

Arguments = Mapping[str, Any]
Clock = Callable[[], float]

_SIBLING_ORDER: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "bytes": lambda entry: -entry["subtree_bytes"],
    "hits": lambda entry: -entry["num_hits"],
    "age": lambda entry: -entry["age_s"],
    "tokens": lambda entry: -entry["num_tokens"],
}
_MIN_RUN = 16  # of the edits from a parent: one-token matches would tell nothing
_DEFAULT_DEPTH = 4
_MAX_DEPTH = 64  # of the document; the tree may be deeper, and `root` starts further down
_SHORTEST_DIGEST = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """A document, and what left the tree: whoever holds KV or an index drops it there as well."""

    document: dict[str, Any]
    freed_segments: tuple[SegmentId, ...] = ()
    removed_nodes: tuple[tuple[str, int], ...] = ()  # namespace and node id


def stats(tree: DeltaTree, arguments: Arguments) -> Answer:
    """
    How much is stored, in all and per namespace.

    Arguments:  namespace
    """
    given = QueryArguments(arguments, "namespace")
    chosen = _namespace(tree, given)
    digests = sorted({node.namespace for node in tree.nodes()}) if chosen is None else [chosen]
    rows = [{"namespace": digest, **asdict(tree.stats(digest))} for digest in digests]
    return Answer({"totals": asdict(tree.stats(chosen)), "namespaces": rows})


def tree(tree: DeltaTree, arguments: Arguments, *, clock: Clock = time.time) -> Answer:
    """
    Prompts below their parents.

    Arguments:  root (a node id), namespace, depth (levels), sort (of siblings: bytes, hits, age, tokens)
    """
    given = QueryArguments(arguments, "root", "namespace", "depth", "sort")
    order = _SIBLING_ORDER[given.choice("sort", _SIBLING_ORDER, default="bytes")]
    depth = given.integer("depth", default=_DEFAULT_DEPTH, maximum=_MAX_DEPTH)
    now = clock()

    def branches(nodes: Collection[Node], levels: int) -> list[dict[str, Any]]:
        if not levels:
            return []
        found = []
        for node in nodes:
            try:
                children = [tree.node(child) for child in tree.children(node.node_id)]
                entry = {**_summary(tree, node, now), "num_children": len(children)}
            except UnknownNodeError:
                continue  # evicted since we began; a running server does not wait for us
            found.append({**entry, "children": branches(children, levels - 1)})
        return sorted(found, key=order)

    return Answer({"depth": depth, "roots": branches(_roots(tree, given), depth)})


def node(tree: DeltaTree, arguments: Arguments, *, clock: Clock = time.time) -> Answer:
    """
    One prompt: whom it was edited from, where its KV lies, and with whom it shares it.

    Arguments:  id
    """
    given = QueryArguments(arguments, "id")
    found = _node(tree, given, "id")
    try:
        parents, shared_with = tree.ancestors(found.node_id), tree.shared_with(found.node_id)
        origin = tree.node(parents[0]) if parents else found
        script = align(origin.token_ids, found.token_ids, min_run=_MIN_RUN)
        document = {
            **_summary(tree, found, clock()),
            "parents": list(parents),
            "children": list(tree.children(found.node_id)),
            "edits": _edits(script) if parents else None,
            "pieces": _pieces(tree, found),
            "shared_with": [{"id": other.node_id, "num_tokens": other.num_tokens} for other in shared_with],
        }
    except (UnknownNodeError, UnknownSegmentError) as exc:  # evicted since we began
        raise _not_found("id", found.node_id) from exc
    return Answer(document)


def diff(tree: DeltaTree, arguments: Arguments) -> Answer:
    """
    The token-level edits from prompt `a` to prompt `b`, which must be of one namespace.

    Arguments:  a, b, min_run (a shorter match counts as a change; 1 unless told)
    """
    given = QueryArguments(arguments, "a", "b", "min_run")
    a, b = _node(tree, given, "a"), _node(tree, given, "b")
    if a.namespace != b.namespace:
        raise RequestError(
            "b: expected a node of the same namespace as a", param="b", code="namespace_mismatch"
        )
    script = align(a.token_ids, b.token_ids, min_run=given.integer("min_run", default=1))
    prefix = next((keep.length for keep in script.keeps if keep.source == keep.target == 0), 0)
    document = {
        "a": a.node_id,
        "b": b.node_id,
        "namespace": a.namespace,
        "num_common_prefix": prefix,
        "kept_share_of_a": script.num_kept / a.num_tokens,
        "kept_share_of_b": script.num_kept / b.num_tokens,
        "edits": _edits(script),
    }
    return Answer(document)


def evict(tree: DeltaTree, arguments: Arguments) -> Answer:
    """
    Drop one prompt, a namespace or everything; only the last two drop pinned prompts. KV still needed stays.

    Arguments:  exactly one of node, namespace, all=true; dry_run (unless told: false for node, else true)
    """
    given = QueryArguments(arguments, "node", "namespace", "all", "dry_run")
    everything = given.boolean("all", default=False)
    if ("node" in given) + ("namespace" in given) + everything != 1:
        raise RequestError("node: expected exactly one of node, namespace and all=true", param="node")
    dry_run = given.boolean("dry_run", default="node" not in given)
    if "node" in given:
        return _evict_node(tree, _node(tree, given, "node"), dry_run=dry_run)
    return _purge(tree, _namespace(tree, given), dry_run=dry_run)


Question = Callable[[DeltaTree, Arguments], Answer]

QUESTIONS: Mapping[str, Question] = {
    "stats": stats,
    "tree": tree,
    "node": node,
    "diff": diff,
    "evict": evict,
}
"""What may be asked. Each raises RequestError for an argument that is wrong, naming it."""


def _evict_node(tree: DeltaTree, node: Node, *, dry_run: bool) -> Answer:
    try:
        if node.pinned:
            raise PinnedNodeError(node.node_id)
        if dry_run:
            owned = [piece for piece in node.pieces.segment_ids if tree.reference_count(piece) == 1]
            return Answer(_eviction(True, 1, len(owned), tree.owned_bytes(node.node_id)))
        return _evicted(tree.evict(node.node_id), [node])
    except PinnedNodeError as exc:
        raise RequestError(f"node: {exc}", param="node", code="node_pinned") from exc
    except UnknownNodeError as exc:
        raise _not_found("node", node.node_id) from exc


def _purge(tree: DeltaTree, namespace: str | None, *, dry_run: bool) -> Answer:
    if dry_run:
        found = tree.stats(namespace)
        return Answer(_eviction(True, found.num_nodes, found.num_segments, found.num_bytes))
    nodes = tree.nodes(namespace)
    return _evicted(tree.purge_all() if namespace is None else tree.purge(namespace), nodes)


def _evicted(gone: Eviction, nodes: Collection[Node]) -> Answer:
    document = _eviction(False, len(nodes), len(gone.freed_segments), gone.freed_bytes)
    return Answer(document, gone.freed_segments, tuple((node.namespace, node.node_id) for node in nodes))


def _eviction(dry_run: bool, num_nodes: int, num_segments: int, freed_bytes: int) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "num_nodes": num_nodes,
        "num_segments": num_segments,
        "freed_bytes": freed_bytes,
    }


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


def _pieces(tree: DeltaTree, node: Node) -> list[dict[str, Any]]:
    """Where the KV of each stretch lies; a shift is how far it is from where it was computed."""
    rows = []
    for start, segment_id, offset, length in node.pieces.rows():
        segment = tree.segment(segment_id)
        rows.append(
            {
                "start": start,
                "end": start + length,
                "segment": f"{segment_id:016x}",
                "offset": offset,
                "shift": start - (segment.first_position + offset),
                "generation": segment.generation,
                "num_references": tree.reference_count(segment_id),
                "num_bytes": round(segment.bytes_per_token * length),
            }
        )
    return rows


def _roots(tree: DeltaTree, given: QueryArguments) -> list[Node]:
    namespace = _namespace(tree, given)
    if "root" in given:
        root = _node(tree, given, "root")
        return [root] if namespace in (None, root.namespace) else []
    return [node for node in tree.nodes(namespace) if not tree.ancestors(node.node_id)]


def _node(tree: DeltaTree, given: QueryArguments, name: str) -> Node:
    node_id = NodeId(given.integer(name))
    found = tree.get(node_id)
    if found is None:
        raise _not_found(name, node_id)
    return found


def _not_found(name: str, node_id: int) -> RequestError:
    message = f"{name}: no node {node_id} is stored; it may have been evicted"
    return RequestError(message, param=name, code="node_not_found")


def _namespace(tree: DeltaTree, given: QueryArguments) -> str | None:
    """The stored namespace whose digest is, or begins with, what was given."""
    if "namespace" not in given:
        return None
    wanted = given.text("namespace")
    if len(wanted) < _SHORTEST_DIGEST:
        raise RequestError(
            f"namespace: expected at least {_SHORTEST_DIGEST} digits of a digest", param="namespace"
        )
    found = {node.namespace for node in tree.nodes() if node.namespace.startswith(wanted)}
    if len(found) != 1:
        raise RequestError(
            f"namespace: expected the digest of one stored namespace, {len(found)} begin with {wanted}",
            param="namespace",
            code="namespace_not_found",
        )
    return found.pop()
