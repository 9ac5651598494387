"""
The order of eviction: least recently used, weighted by reuse, with dynamic aging (after LFU-DA, Arlitt et
al., 2000).

    worth = floor at the last use + 1 + tokens copied from the node for other texts / tokens of the node

The node of least worth is evicted first; of equal nodes the one used least recently. When a node is evicted
to make room, its worth becomes the floor, so that copies of long ago count less and less. Where nothing is
copied for other texts, this is least recently used.

Nodes compete for room with the others of a scope: all, their namespace, or a group that it was put into, such
as a memory, or all that one tenant has. A group may have any number of namespaces, and a namespace be in
several.
"""

from collections import defaultdict
from collections.abc import Collection, Container
from heapq import heapify, heappop, heappush
from itertools import count

from delta_tree.node import Node, NodeId

_Rank = tuple[float, int]  # worth, place in the order of use
_MIN_STALE = 64  # stale entries that a heap may hold, however few nodes there are


class EvictionOrder:
    """One order of all nodes that may be evicted, and one per scope. A use costs O(log n), amortised."""

    def __init__(self) -> None:
        self._ranks: defaultdict[str | None, dict[NodeId, _Rank]] = defaultdict(dict)  # of all: under None
        self._heaps: defaultdict[str | None, list[tuple[_Rank, NodeId]]] = defaultdict(list)
        self._num_copied: defaultdict[NodeId, float] = defaultdict(float)  # tokens, see `record_copies`
        self._floors: dict[str | None, float] = {}
        self._groups_of: dict[str, tuple[str, ...]] = {}  # of a namespace those that it was put into
        self._places = count()

    def put_into(self, group: str, namespace: str) -> bool:
        """
        The namespace's nodes compete with all others of this group, too, from now on.

        Returns: whether it was not in it before. It cannot be taken out
        """
        groups = self.groups_of(namespace)
        if group in groups:
            return False
        self._groups_of[namespace] = (*groups, group)
        for node_id, rank in self._ranks.get(namespace, {}).items():
            self._ranks[group][node_id] = rank
            heappush(self._heaps[group], (rank, node_id))
        return True

    def groups_of(self, namespace: str) -> tuple[str, ...]:
        """The groups that the namespace was put into."""
        return self._groups_of.get(namespace, ())

    def forget(self, namespace: str) -> None:
        """Called when a namespace has no nodes left: clients may name any number of them."""
        self._groups_of.pop(namespace, None)
        self._floors.pop(namespace, None)

    def record_copies(self, node_id: NodeId, num_tokens: int) -> None:
        """Count tokens that were copied from a node for another text; its rank changes at its next use."""
        self._num_copied[node_id] += num_tokens

    def record_use(self, node: Node) -> None:
        """Rank a node that is used now; a pinned node is taken out of the order."""
        self._take_out(node)
        if node.pinned:
            return
        floor = max(self._floors.get(scope, 0.0) for scope in self._scopes(node))
        copied = self._num_copied.get(node.node_id, 0.0) / max(1, node.num_tokens)
        rank = (floor + 1.0 + copied, next(self._places))
        for scope in self._scopes(node):
            ranks, heap = self._ranks[scope], self._heaps[scope]
            ranks[node.node_id] = rank
            heappush(heap, (rank, node.node_id))
            if len(heap) > 2 * len(ranks) + _MIN_STALE:  # mostly stale entries
                heap[:] = [(current, node_id) for node_id, current in ranks.items()]
                heapify(heap)

    def age(self, node_id: NodeId, scopes: Collection[str] | None) -> None:
        """Raise the floor of these scopes (None: of all) to the worth of a node about to be evicted."""
        if (rank := self._ranks[None].get(node_id)) is not None:
            for scope in (None,) if scopes is None else scopes:
                self._floors[scope] = max(self._floors.get(scope, 0.0), rank[0])

    def shorten(self, node_id: NodeId, kept: float) -> None:
        """Multiply a node's copied tokens by `kept`, the share of its tokens that is left; its rank stays."""
        if node_id in self._num_copied:
            self._num_copied[node_id] *= kept

    def remove(self, node: Node) -> None:
        """Take a node out; an unknown one is ignored."""
        self._num_copied.pop(node.node_id, None)
        self._take_out(node)

    def first(self, scopes: Collection[str] | None, without: Container[NodeId]) -> NodeId | None:
        """The node of these scopes (None: of all) to evict first, not in `without`; None if none."""
        heads = (self._head(scope, without) for scope in ((None,) if scopes is None else scopes))
        return min((head for head in heads if head is not None), default=(None, None))[1]

    def _head(self, scope: str | None, without: Container[NodeId]) -> tuple[_Rank, NodeId] | None:
        ranks, heap = self._ranks.get(scope, {}), self._heaps.get(scope, [])
        passed: list[tuple[_Rank, NodeId]] = []
        while heap and (ranks.get(heap[0][1]) != heap[0][0] or heap[0][1] in without):
            entry = heappop(heap)
            if ranks.get(entry[1]) == entry[0]:
                passed.append(entry)
        head = heap[0] if heap else None
        for entry in passed:
            heappush(heap, entry)
        return head

    def _take_out(self, node: Node) -> None:
        """Remove a node's ranks: its entries in the heaps are stale from then on."""
        for scope in self._scopes(node):
            self._ranks[scope].pop(node.node_id, None)
            if not self._ranks[scope]:
                del self._ranks[scope]
                self._heaps.pop(scope, None)

    def _scopes(self, node: Node) -> tuple[str | None, ...]:
        return (None, node.namespace, *self.groups_of(node.namespace))
