"""
Administrators' commands: evict prompts, protect them from eviction, and end the protection.

A command changes the tree only. Its result names what else must change: the caller drops the KV and the index
entries of what was evicted, and pins if there is memory enough.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from delta_tree import DeltaTree, Eviction, Node, NodeId, PinnedNodeError, SegmentId, UnknownNodeError
from kvshare.admin.arguments import (
    NO_TENANTS,
    STRICT,
    Digest,
    Flag,
    Number,
    TenantName,
    chosen,
    node_of,
    nodes_of,
    not_found,
)
from kvshare.admin.documents import EvictionDocument, PinDocument
from kvshare.errors import ErrorCode, RequestError
from kvshare.tenants import Tenants

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
    Evict one prompt, or purge a namespace, a tenant or everything, pinned prompts too. KV that others need
    stays.

    Exactly one of `node`, `namespace`, `tenant` and `all`. `dry_run` is false by default for `node` only.
    `older_than_s`: only those that were not used for so long; pinned ones stay then.
    """

    __pydantic_config__ = STRICT
    node: Number | None = None
    namespace: Digest | None = None
    tenant: TenantName | None = None
    all: Flag = False
    older_than_s: Number | None = None
    dry_run: Flag | None = None

    @property
    def is_dry_run(self) -> bool:
        return self.node is None if self.dry_run is None else self.dry_run

    def apply(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> CommandResult[EvictionDocument]:
        _check_one_of(node=self.node, namespace=self.namespace, tenant=self.tenant, all=self.all or None)
        if self.node is not None:
            if self.older_than_s is not None:
                raise RequestError("older_than_s: expected none with node", param="older_than_s")
            return self._evict_node(tree, node_of(tree, "node", self.node))
        nodes = nodes_of(tree, chosen(tree, tenants, namespace=self.namespace, tenant=self.tenant))
        if self.older_than_s is not None:
            since = time.time() - self.older_than_s
            nodes = tuple(node for node in nodes if not node.pinned and node.last_used_at < since)
        ids = [node.node_id for node in nodes]
        return self._evicted(nodes, tree.freed_by(ids) if self.is_dry_run else tree.purge_nodes(ids))

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
    """Protect one prompt from eviction, or all that a namespace or a tenant has now; exactly one of them."""

    __pydantic_config__ = STRICT
    node: Number | None = None
    namespace: Digest | None = None
    tenant: TenantName | None = None

    def apply(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> CommandResult[PinDocument]:
        """Pins nothing yet: see `CommandResult.to_pin`."""
        _check_one_of(node=self.node, namespace=self.namespace, tenant=self.tenant)
        nodes = _one_or_all(self, tree, tenants)
        return CommandResult(_sizes(tree, nodes), to_pin=tuple(node.node_id for node in nodes))


@dataclass(frozen=True, slots=True)
class Unpin:
    """Allow eviction again: of one prompt, those of a namespace or a tenant, or all; exactly one of them."""

    __pydantic_config__ = STRICT
    node: Number | None = None
    namespace: Digest | None = None
    tenant: TenantName | None = None
    all: Flag = False

    def apply(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> CommandResult[PinDocument]:
        _check_one_of(node=self.node, namespace=self.namespace, tenant=self.tenant, all=self.all or None)
        nodes = [node for node in _one_or_all(self, tree, tenants) if node.pinned]
        tree.unpin(*(node.node_id for node in nodes))
        return CommandResult(_sizes(tree, nodes))


Command = Evict | Pin | Unpin


def _check_one_of(**given: object) -> None:
    """Raises RequestError unless exactly one of the arguments is given."""
    if sum(value is not None for value in given.values()) != 1:
        *names, last = ("all=true" if name == "all" else name for name in given)
        raise RequestError(f"node: expected exactly one of {', '.join(names)} and {last}", param="node")


def _one_or_all(command: Pin | Unpin, tree: DeltaTree, tenants: Tenants) -> Collection[Node]:
    if command.node is not None:
        return (node_of(tree, "node", command.node),)
    return nodes_of(tree, chosen(tree, tenants, namespace=command.namespace, tenant=command.tenant))


def _sizes(tree: DeltaTree, nodes: Collection[Node]) -> PinDocument:
    segments = {segment_id for node in nodes for segment_id in node.pieces.segment_ids}
    num_bytes = sum(tree.segment(segment_id).num_bytes for segment_id in segments)
    return {"num_nodes": len(nodes), "num_bytes": num_bytes}
