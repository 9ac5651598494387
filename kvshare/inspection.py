"""
An operator's questions to the store, answered as JSON-ready documents.

Pure functions over a `DeltaTree`, asked by the server's admin routes and by `kvshare tree` and its kin on a
stopped store; arguments may be text, as they come from a query string. Documents carry spans and counts, no
token ids. Segment ids go out as 16 hex digits: they do not fit a JSON number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from delta_tree import (
    DeltaTree,
    EditScript,
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
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


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
    _check_names(arguments, "namespace")
    chosen = _namespace(tree, arguments)
    digests = sorted({node.namespace for node in tree.nodes()}) if chosen is None else [chosen]
    rows = [{"namespace": digest, **asdict(tree.stats(digest))} for digest in digests]
    return Answer({"totals": asdict(tree.stats(chosen)), "namespaces": rows})


def tree(tree: DeltaTree, arguments: Arguments, *, clock: Clock = time.time) -> Answer:
    """
    Prompts below their parents.

    Arguments:  root (a node id), namespace, depth (levels), sort (of siblings: bytes, hits, age, tokens)
    """
    _check_names(arguments, "root", "namespace", "depth", "sort")
    order = _SIBLING_ORDER[_choice(arguments, "sort", _SIBLING_ORDER, default="bytes")]
    depth = _integer(arguments, "depth", default=_DEFAULT_DEPTH, minimum=1, maximum=_MAX_DEPTH)
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

    return Answer({"depth": depth, "roots": branches(_roots(tree, arguments), depth)})


def node(tree: DeltaTree, arguments: Arguments, *, clock: Clock = time.time) -> Answer:
    """
    One prompt: whom it was edited from, where its KV lies, and with whom it shares it.

    Arguments:  id
    """
    _check_names(arguments, "id")
    found = _node(tree, arguments, "id")
    try:
        parents, shared_with = tree.ancestors(found.node_id), tree.shared_with(found.node_id)
        document = {
            **_summary(tree, found, clock()),
            "parents": list(parents),
            "children": list(tree.children(found.node_id)),
            "edits": _edits_from(tree.node(parents[0]), found) if parents else None,
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
    _check_names(arguments, "a", "b", "min_run")
    a, b = _node(tree, arguments, "a"), _node(tree, arguments, "b")
    if a.namespace != b.namespace:
        raise RequestError(
            "b: expected a node of the same namespace as a", param="b", code="namespace_mismatch"
        )
    script = align(a.token_ids, b.token_ids, min_run=_integer(arguments, "min_run", default=1, minimum=1))
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
    _check_names(arguments, "node", "namespace", "all", "dry_run")
    everything = _boolean(arguments, "all", default=False)
    if sum(_is_given(arguments, name) for name in ("node", "namespace")) + everything != 1:
        raise RequestError("node: expected exactly one of node, namespace and all=true", param="node")
    dry_run = _boolean(arguments, "dry_run", default=not _is_given(arguments, "node"))
    if _is_given(arguments, "node"):
        return _evict_node(tree, _node(tree, arguments, "node"), dry_run=dry_run)
    return _purge(tree, _namespace(tree, arguments), dry_run=dry_run)


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
            return _would_evict(1, len(owned), tree.owned_bytes(node.node_id))
        gone = tree.evict(node.node_id)
    except PinnedNodeError as exc:
        raise RequestError(f"node: {exc}", param="node", code="node_pinned") from exc
    except UnknownNodeError as exc:
        raise _not_found("node", node.node_id) from exc
    return _evicted(gone.freed_segments, gone.freed_bytes, [node])


def _purge(tree: DeltaTree, namespace: str | None, *, dry_run: bool) -> Answer:
    if dry_run:
        found = tree.stats(namespace)
        return _would_evict(found.num_nodes, found.num_segments, found.num_bytes)
    nodes = tree.nodes(namespace)
    gone = tree.purge_all() if namespace is None else tree.purge(namespace)
    return _evicted(gone.freed_segments, gone.freed_bytes, nodes)


def _would_evict(num_nodes: int, num_segments: int, freed_bytes: int) -> Answer:
    return Answer(
        {"dry_run": True, "num_nodes": num_nodes, "num_segments": num_segments, "freed_bytes": freed_bytes}
    )


def _evicted(freed: tuple[SegmentId, ...], freed_bytes: int, nodes: Collection[Node]) -> Answer:
    document = {
        "dry_run": False,
        "num_nodes": len(nodes),
        "num_segments": len(freed),
        "freed_bytes": freed_bytes,
    }
    return Answer(document, freed, tuple((node.namespace, node.node_id) for node in nodes))


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


def _edits_from(parent: Node, node: Node) -> dict[str, Any]:
    return _edits(align(parent.token_ids, node.token_ids, min_run=_MIN_RUN))


def _edits(script: EditScript) -> dict[str, Any]:
    """Spans [start, end) in both prompts; counts in tokens of the target, for deletes of the source."""
    counts = dict.fromkeys((op.value for op in Op), 0)
    ops = []
    for edit in script.edits:
        counts[edit.op.value] += len(edit.source if edit.op is Op.DELETE else edit.target)
        source, target = edit.source, edit.target
        ops.append(
            {
                "op": edit.op.value,
                "source": [source.start, source.end],
                "target": [target.start, target.end],
            }
        )
    return {"counts": counts, "ops": ops}


def _pieces(tree: DeltaTree, node: Node) -> list[dict[str, Any]]:
    """Where the KV of each stretch lies; a shift is how far it is from where it was computed."""
    rows = []
    for span, piece in node.pieces.spans():
        segment = tree.segment(piece.segment_id)
        rows.append(
            {
                "start": span.start,
                "end": span.end,
                "segment": f"{piece.segment_id:016x}",
                "offset": piece.offset,
                "shift": span.start - (segment.first_position + piece.offset),
                "generation": segment.generation,
                "num_references": tree.reference_count(piece.segment_id),
                "num_bytes": round(segment.bytes_per_token * piece.length),
            }
        )
    return rows


def _roots(tree: DeltaTree, arguments: Arguments) -> list[Node]:
    namespace = _namespace(tree, arguments)
    if _is_given(arguments, "root"):
        root = _node(tree, arguments, "root")
        return [root] if namespace in (None, root.namespace) else []
    return [node for node in tree.nodes(namespace) if not tree.ancestors(node.node_id)]


def _check_names(arguments: Arguments, *known: str) -> None:
    """A misspelt `dry_run` must not evict."""
    for name in arguments:
        if name not in known:
            raise RequestError(f"{name}: unknown argument; expected one of: {', '.join(known)}", param=name)


def _is_given(arguments: Arguments, name: str) -> bool:
    return arguments.get(name) is not None


def _node(tree: DeltaTree, arguments: Arguments, name: str) -> Node:
    node_id = NodeId(_integer(arguments, name, default=None, minimum=1))
    found = tree.get(node_id)
    if found is None:
        raise _not_found(name, node_id)
    return found


def _not_found(name: str, node_id: int) -> RequestError:
    message = f"{name}: no node {node_id} is stored; it may have been evicted"
    return RequestError(message, param=name, code="node_not_found")


def _namespace(tree: DeltaTree, arguments: Arguments) -> str | None:
    """The stored namespace whose digest is, or begins with, what was given."""
    if not _is_given(arguments, "namespace"):
        return None
    wanted = str(arguments["namespace"])
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


def _integer(
    arguments: Arguments, name: str, *, default: int | None, minimum: int, maximum: int = 2**53 - 1
) -> int:
    """A None default makes the argument required."""
    value = arguments.get(name)
    number = default if value is None else _parsed(value)
    if number is None or not minimum <= number <= maximum:
        got = "nothing" if value is None else repr(value)
        raise RequestError(f"{name}: expected an integer from {minimum} to {maximum}, got {got}", param=name)
    return number


def _parsed(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else None


def _boolean(arguments: Arguments, name: str, *, default: bool) -> bool:
    value = arguments.get(name)
    if value is None:
        return default
    if (truth := _BOOLEANS.get(str(value).lower())) is None:
        raise RequestError(f"{name}: expected true or false, got {value!r}", param=name)
    return truth


def _choice(arguments: Arguments, name: str, choices: Collection[str], *, default: str) -> str:
    value = arguments.get(name)
    chosen = default if value is None else str(value)
    if chosen not in choices:
        raise RequestError(f"{name}: expected one of {', '.join(choices)}, got {chosen!r}", param=name)
    return chosen
