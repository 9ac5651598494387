"""
What an administrator may change: evict prompts, protect them from eviction, and allow it again.

A command changes the tree only. Its result names what else must change: the caller drops the KV and the index
entries of what was evicted, and pins if there is memory enough.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from delta_tree import DeltaTree, Eviction, Node, NodeId, PinnedNodeError, SegmentId, UnknownNodeError
from kvshare.admin.arguments import STRICT, Digest, Flag, Number, namespace_of, node_of, not_found
from kvshare.admin.documents import EvictionDocument, PinDocument
from kvshare.errors import ErrorCode, RequestError

DocumentT = TypeVar("DocumentT")


@dataclass(frozen=True, slots=True)
class CommandResult(Generic[DocumentT]):
    """
    A document, and what left the tree, which the caller drops from the KV tiers and the index as well.

    `to_pin`: the caller, who knows how much memory there is, pins these or refuses to.
    """

    document: DocumentT
    freed_segments: tuple[SegmentId, ...] = ()
    removed_nodes: tuple[tuple[str, int], ...] = ()  # namespace and node id
    to_pin: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """
    Evict one prompt, or purge a namespace or everything, pinned prompts too. KV that others need stays.

    Exactly one of `node`, `namespace` and `all`. `dry_run` is false by default for `node`, else true.
    """

    __pydantic_config__ = STRICT
    node: Number | None = None
    namespace: Digest | None = None
    all: Flag = False
    dry_run: Flag | None = None

    @property
    def is_dry_run(self) -> bool:
        return self.node is None if self.dry_run is None else self.dry_run

    def apply(self, tree: DeltaTree) -> CommandResult[EvictionDocument]:
        _check_one_of(node=self.node, namespace=self.namespace, all=self.all or None)
        if self.node is not None:
            return self._evict_node(tree, node_of(tree, "node", self.node))
        chosen = namespace_of(tree, self.namespace)
        nodes = tree.nodes(chosen)
        if not self.is_dry_run:
            return self._evicted(nodes, tree.purge_all() if chosen is None else tree.purge(chosen))
        segments = tuple(segment.segment_id for segment in tree.segments(chosen))
        return self._evicted(nodes, Eviction(len(nodes), segments, tree.stats(chosen).num_bytes))

    def _evict_node(self, tree: DeltaTree, node: Node) -> CommandResult[EvictionDocument]:
        try:
            if node.pinned:
                raise PinnedNodeError(node.node_id)
            if not self.is_dry_run:
                return self._evicted([node], tree.evict(node.node_id))
            owned = tuple(piece for piece in node.pieces.segment_ids if tree.reference_count(piece) == 1)
            return self._evicted([node], Eviction(1, owned, tree.owned_bytes(node.node_id)))
        except PinnedNodeError as exc:
            raise RequestError(f"node: {exc}", param="node", code=ErrorCode.NODE_PINNED) from exc
        except UnknownNodeError as exc:
            raise not_found("node", node.node_id) from exc

    def _evicted(self, nodes: Collection[Node], gone: Eviction) -> CommandResult[EvictionDocument]:
        document: EvictionDocument = {
            "dry_run": self.is_dry_run,
            "num_nodes": gone.num_nodes,
            "num_segments": len(gone.freed_segments),
            "freed_bytes": gone.freed_bytes,
        }
        if self.is_dry_run:
            return CommandResult(document)
        removed = tuple((node.namespace, int(node.node_id)) for node in nodes)
        return CommandResult(document, gone.freed_segments, removed)


@dataclass(frozen=True, slots=True)
class Pin:
    """Protect one prompt from eviction, or all that a namespace has now; exactly one of the two."""

    __pydantic_config__ = STRICT
    node: Number | None = None
    namespace: Digest | None = None

    def apply(self, tree: DeltaTree) -> CommandResult[PinDocument]:
        """Pins nothing yet: see `CommandResult.to_pin`."""
        _check_one_of(node=self.node, namespace=self.namespace)
        nodes = _one_or_all(tree, self.node, self.namespace)
        return CommandResult(_sizes(tree, nodes), to_pin=tuple(node.node_id for node in nodes))


@dataclass(frozen=True, slots=True)
class Unpin:
    """Allow eviction again: of one prompt, those of a namespace, or all; exactly one of the three."""

    __pydantic_config__ = STRICT
    node: Number | None = None
    namespace: Digest | None = None
    all: Flag = False

    def apply(self, tree: DeltaTree) -> CommandResult[PinDocument]:
        _check_one_of(node=self.node, namespace=self.namespace, all=self.all or None)
        nodes = [node for node in _one_or_all(tree, self.node, self.namespace) if node.pinned]
        tree.unpin(*(node.node_id for node in nodes))
        return CommandResult(_sizes(tree, nodes))


Command = Evict | Pin | Unpin


def _check_one_of(**given: object) -> None:
    """Raises RequestError unless exactly one of the arguments is given."""
    if sum(value is not None for value in given.values()) != 1:
        *names, last = ("all=true" if name == "all" else name for name in given)
        raise RequestError(f"node: expected exactly one of {', '.join(names)} and {last}", param="node")


def _one_or_all(tree: DeltaTree, node_id: int | None, namespace: str | None) -> Collection[Node]:
    return tree.nodes(namespace_of(tree, namespace)) if node_id is None else (node_of(tree, "node", node_id),)


def _sizes(tree: DeltaTree, nodes: Collection[Node]) -> PinDocument:
    segments = {segment_id for node in nodes for segment_id in node.pieces.segment_ids}
    num_bytes = sum(tree.segment(segment_id).num_bytes for segment_id in segments)
    return {"num_nodes": len(nodes), "num_bytes": num_bytes}
