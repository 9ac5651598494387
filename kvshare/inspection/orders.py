"""The questions that change the store: evict, pin, unpin."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from delta_tree import DeltaTree, Eviction, Node, PinnedNodeError, UnknownNodeError
from kvshare.errors import ErrorCode, RequestError
from kvshare.inspection.question import Answer, namespace_of, node_of, not_found, question
from kvshare.query_arguments import Digest, Flag, Number


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
    if dry_run:
        return Answer(document)
    return Answer(document, gone.freed_segments, tuple((node.namespace, node.node_id) for node in nodes))
