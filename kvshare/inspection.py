"""
An operator's questions to the store, answered as JSON-ready documents.

Pure functions over a `DeltaTree`, asked by the server's admin routes and by `kvshare tree` and its kin on a stopped
store; arguments may be text, as they come from a query string. Documents carry spans and counts, never token ids.
Segment ids go out as 16 hex digits: they do not fit a JSON number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from delta_tree import DeltaTree, EditScript, Node, NodeId, SegmentId, TreeStats, UnknownNodeError, align
from kvshare.errors import RequestError

Arguments = Mapping[str, Any]
Clock = Callable[[], float]

_SIBLING_ORDER: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "bytes": lambda entry: -entry["subtree_bytes"],
    "hits": lambda entry: -entry["num_hits"],
    "age": lambda entry: -entry["age_s"],
    "tokens": lambda entry: -entry["num_tokens"],
}
_DEFAULT_DEPTH = 4
_SHORTEST_DIGEST = 4
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True)
class Answer:
    """A document, and what is gone from the tree: whoever holds KV or an index drops it there as well."""

    document: dict[str, Any]
    freed_segments: tuple[SegmentId, ...] = ()
    removed_nodes: tuple[NodeId, ...] = ()


def stats(tree: DeltaTree, arguments: Arguments) -> Answer:
    """
    How much is stored, in all and per namespace.

    Arguments:  namespace
    """
    _only_known(arguments, "namespace")
    chosen = _namespace(tree, arguments)
    namespaces = _namespaces(tree) if chosen is None else [chosen]
    rows = [{"namespace": digest, **_counts(tree.stats(digest))} for digest in namespaces]
    return Answer({"totals": _counts(tree.stats(chosen)), "namespaces": rows})


def tree(tree: DeltaTree, arguments: Arguments, *, clock: Clock = time.time) -> Answer:
    """
    Prompts below their parents.

    Arguments:  root (a node id), namespace, depth (levels), sort (of siblings: bytes, hits, age, tokens)
    """
    _only_known(arguments, "root", "namespace", "depth", "sort")
    order = _SIBLING_ORDER[_choice(arguments, "sort", _SIBLING_ORDER)]
    depth = _integer(arguments, "depth", default=_DEFAULT_DEPTH, minimum=1)
    now = clock()

    def branch(node: Node, levels: int) -> dict[str, Any]:
        children = tree.children(node.node_id)
        shown = [branch(tree.node(child), levels - 1) for child in children] if levels > 1 else []
        shown.sort(key=order)
        return {**_summary(tree, node, now), "num_children": len(children), "children": shown}

    roots = sorted((branch(node, depth) for node in _roots(tree, arguments)), key=order)
    return Answer({"depth": depth, "roots": roots})


def node(tree: DeltaTree, arguments: Arguments, *, clock: Clock = time.time) -> Answer:
    """
    One prompt: whom it was edited from, where its KV lies, and with whom it shares it.

    Arguments:  id
    """
    _only_known(arguments, "id")
    found = _node(tree, arguments, "id")
    return Answer(
        {
            **_summary(tree, found, clock()),
            "parents": _parents(tree, found),
            "children": list(tree.children(found.node_id)),
            "edits": None if found.script is None else _edits(found.script),
            "pieces": _pieces(tree, found),
            "shared_with": _shared_with(tree, found),
        }
    )


def diff(tree: DeltaTree, arguments: Arguments) -> Answer:
    """
    The token-level edits from prompt `a` to prompt `b`, which must be of one namespace.

    Arguments:  a, b, min_run (a shorter match counts as a change; 1 unless told)
    """
    _only_known(arguments, "a", "b", "min_run")
    a, b = _node(tree, arguments, "a"), _node(tree, arguments, "b")
    if a.namespace != b.namespace:
        raise RequestError("b: expected a node of the namespace of a", param="b", code="namespace_mismatch")
    script = align(a.token_ids, b.token_ids, min_run=_integer(arguments, "min_run", default=1, minimum=1))
    return Answer(
        {
            "a": a.node_id,
            "b": b.node_id,
            "namespace": a.namespace,
            "num_common_prefix": _common_prefix(script),
            "kept_share_of_a": _share(script.num_kept, a.num_tokens),
            "kept_share_of_b": _share(script.num_kept, b.num_tokens),
            "edits": _edits(script),
        }
    )
