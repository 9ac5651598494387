"""
The order of eviction of the nodes of a tree: one queue per scope, all of one policy.

A scope is all nodes that may be evicted, a namespace, or a group of namespaces, such as those in one memory
or of one tenant. Nodes compete for room with the others of a scope. A namespace may be in several groups.
When a node is evicted to make room, its worth becomes the floor of nodes that are used later, so that copies
made long ago count less and less.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any, Final

from delta_tree.adaptive_queue import AdaptiveQueue
from delta_tree.eviction_queue import CopiesQueue, EvictionQueue, RecencyQueue, Use
from delta_tree.node import Node, NodeId
from delta_tree.s3_fifo import S3FifoQueue
from delta_tree.worth_queue import WorthQueue

NewQueue = Callable[[], EvictionQueue[NodeId]]
Origin = tuple[Node | None, int]

EVICTION_QUEUES: Final[Mapping[str, type[EvictionQueue[Any]]]] = MappingProxyType(
    {
        "adaptive": AdaptiveQueue,
        "copies": CopiesQueue,
        "lru": RecencyQueue,
        "s3-fifo": S3FifoQueue,
        "worth": WorthQueue,
    }
)
"""The queue of each value of the setting `store.eviction`."""

DEFAULT_EVICTION: Final = "adaptive"
"""Of the setting. A tree evicts as `copies` does until `DeltaTree.evict_by` is called."""

_SHORTEST_NAME = 32  # tokens
_LOOKED_UP = 3  # the longest names of a prompt: of prefixes with an eighth of its tokens or more


class EvictionOrder:
    """The queues of all scopes. The docstring of the policy's queue says what a use costs."""

    def __init__(self, new_queue: NewQueue = CopiesQueue) -> None:
        self.new_queue = new_queue
        # By scope; under None the queue of all nodes.
        self._queues: defaultdict[str | None, EvictionQueue[NodeId]] = defaultdict(new_queue)
        self._needs_names = self._queues[None].needs_names
        self._num_copied: defaultdict[NodeId, float] = defaultdict(float)  # tokens, see `record_copies`
        self._floors: dict[str | None, float] = {}
        self._groups_of: dict[str, tuple[str, ...]] = {}  # by namespace
        self._leaving: NodeId | None = None  # the node that is being evicted for room, see `age`
        self._share: tuple[NodeId | None, float] = None, 1.0  # see `record_share`
        self._places = count()

    def emptied(self, new_queue: NewQueue | None = None) -> "EvictionOrder":
        """Return an order with the same groups and no nodes; of the same policy by default."""
        order = EvictionOrder(new_queue or self.new_queue)
        order._groups_of = self._groups_of
        return order

    def put_into(self, group: str, namespace: str) -> bool:
        """
        Let the namespace's nodes compete with the others of this group, too. That cannot be undone.

        Returns: whether the namespace was not in the group before
        """
        groups = self.groups_of(namespace)
        if group in groups:
            return False
        self._groups_of[namespace] = (*groups, group)
        if (own := self._queues.get(namespace)) is not None:
            for node_id, use in sorted(own.entries(), key=lambda each: each[1].place):
                self._queues[group].use(node_id, use)
        return True

    def groups_of(self, namespace: str) -> tuple[str, ...]:
        """Return the groups that the namespace was put into."""
        return self._groups_of.get(namespace, ())

    def forget(self, namespace: str) -> None:
        """Forget a namespace without nodes: clients may name any number of namespaces."""
        self._groups_of.pop(namespace, None)
        self._floors.pop(namespace, None)

    def record_copies(self, node_id: NodeId, num_tokens: int) -> None:
        """Count tokens that were copied from a node for another text; its rank changes at its next use."""
        self._num_copied[node_id] += num_tokens

    def record_share(self, node_id: NodeId, share: float) -> None:
        """Note which share of a node's tokens its next use is of; 1 by default."""
        self._share = node_id, share

    def record_use(self, node: Node, *, origin: Callable[[], Origin] | None = None) -> None:
        """
        Rank a node that is used now; a pinned one is taken out.

        `origin` is called for a new node. It returns the node's parent, and the number of the node's leading
        tokens whose KV other nodes refer to as well. None: the node is loaded from disk; it has no names
        """
        if node.pinned:
            self._take_out(node)
            return
        scopes, last = self._scopes(node), self._queues[None].last_use(node.node_id)
        floor = max(self._floors.get(scope, 0.0) for scope in scopes)
        copied = self._num_copied.get(node.node_id, 0.0) / max(1, node.num_tokens)
        use = Use(
            worth=floor + 1.0 + copied,
            place=next(self._places),
            size=node.num_tokens,
            copied=copied,
            depth=1 if last is None else last.depth,
            share=self._share[1] if self._share[0] == node.node_id else 1.0,
        )
        self._share = None, 1.0
        if last is None and self._needs_names and origin is not None:
            use = self._introduced(node, use, *origin())
        for scope in scopes:
            self._queues[scope].use(node.node_id, use)

    def _introduced(self, node: Node, use: Use, parent: Node | None, num_found: int) -> Use:
        """Add a new node's names and depth. It builds on a parent of which it shares at least half."""
        names = _names_of(node)
        before = None if parent is None else self._queues[None].last_use(parent.node_id)
        if parent is not None and 2 * num_found >= parent.num_tokens:
            use = use._replace(depth=1 + (1 if before is None else before.depth))
        earlier = tuple(name for length, name in names if length > num_found)
        return use._replace(name=names[0][1] if names else None, earlier=earlier[:_LOOKED_UP])

    def age(self, node_id: NodeId, scopes: Collection[str] | None, *, raises_floor: bool = True) -> None:
        """
        Announce that a node is evicted for room. With `raises_floor`, raise the floor of these scopes (None:
        the scope of all nodes) to the node's worth.
        """
        if (use := self._queues[None].last_use(node_id)) is not None:
            self._leaving = node_id
            for scope in ((None,) if scopes is None else scopes) if raises_floor else ():
                self._floors[scope] = max(self._floors.get(scope, 0.0), use.worth)

    def relieve(self, node: Node) -> None:
        """Note that a new node holds what it has used of this one, its parent."""
        for scope in self._scopes(node):
            if (queue := self._queues.get(scope)) is not None:
                queue.relieve(node.node_id)

    def shorten(self, node_id: NodeId, kept: float) -> None:
        """Multiply a node's copied tokens by `kept`, the share of its tokens that is left; its rank stays."""
        self._leaving = None  # the node that `age` announced stays
        if node_id in self._num_copied:
            self._num_copied[node_id] *= kept

    def remove(self, node: Node) -> None:
        """Take a node out; an unknown one is ignored."""
        self._num_copied.pop(node.node_id, None)
        self._take_out(node)

    def first(self, scopes: Collection[str] | None, without: Container[NodeId]) -> NodeId | None:
        """Return the node of these scopes (None: of all) to evict first, if any is not in `without`."""
        named = (None,) if scopes is None else scopes
        heads = (self._queues[scope].first(without) for scope in named if scope in self._queues)
        return min((head for head in heads if head is not None), default=(None, None))[1]

    def _take_out(self, node: Node) -> None:
        is_for_room = node.node_id == self._leaving
        self._leaving = None if is_for_room else self._leaving
        for scope in self._scopes(node):
            if (queue := self._queues.get(scope)) is not None:
                queue.remove(node.node_id, for_room=is_for_room)
                if scope is not None and not len(queue):
                    del self._queues[scope]

    def _scopes(self, node: Node) -> tuple[str | None, ...]:
        return (None, node.namespace, *self.groups_of(node.namespace))


def _names_of(node: Node) -> list[tuple[int, bytes]]:
    """
    Return lengths and digests of a prompt's first 32, 64, 128, ... tokens, the longest first.

    An evicted prompt is remembered by its longest name. Each prompt that continues it has that name, too.
    """
    digest = hashlib.blake2b(node.namespace.encode(), digest_size=16)
    names, start, end = [], 0, _SHORTEST_NAME
    while end <= node.num_tokens:
        digest.update(node.token_ids[start:end].tobytes())
        names.append((end, digest.copy().digest()))
        start, end = end, 2 * end
    return names[::-1]
