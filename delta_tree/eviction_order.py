"""
Who is evicted first: what has given other texts least, then what was used least recently.

A node is worth one, and the tokens that were copied from it for other texts in lengths of itself, above
the floor of the time when it was used last. The floor is the worth of what left for room, so that old merits
fade: least frequently used with dynamic aging (Arlitt et al., 2000). Where nothing is given, only use counts.
"""

from collections import defaultdict
from collections.abc import Collection, Container
from heapq import heapify, heappop, heappush
from itertools import count

from delta_tree.node import Node, NodeId

_Rank = tuple[float, int]  # worth, place in the order of use
_MIN_STALE = 64  # entries that a heap may hold in vain, however few nodes there are


class EvictionOrder:
    """Nodes that may be evicted, in one order and in one per namespace. A use takes O(log n), amortised."""

    def __init__(self) -> None:
        self._ranks: defaultdict[str | None, dict[NodeId, _Rank]] = defaultdict(dict)  # of all: under None
        self._heaps: defaultdict[str | None, list[tuple[_Rank, NodeId]]] = defaultdict(list)
        self._given: defaultdict[NodeId, float] = defaultdict(float)  # tokens
        self._floors: defaultdict[str | None, float] = defaultdict(float)
        self._places = count()

    def give(self, node: Node, num_tokens: int) -> None:
        """So many tokens of a node were copied for another text; it counts from the node's next `put`."""
        self._given[node.node_id] += num_tokens

    def put(self, node: Node) -> None:
        """A node was used now; a pinned one is not in the order."""
        for scope in (None, node.namespace):
            self._take_out(node.node_id, scope)
        if node.pinned:
            return
        floor = max(self._floors[None], self._floors[node.namespace])
        given = self._given.get(node.node_id, 0.0) / max(1, node.num_tokens)
        rank = (floor + 1.0 + given, next(self._places))
        for scope in (None, node.namespace):
            self._ranks[scope][node.node_id] = rank
            heappush(self._heaps[scope], (rank, node.node_id))
            self._tidy(scope)

    def age(self, node_id: NodeId, namespaces: Collection[str] | None) -> None:
        """A node leaves for room that these namespaces share: what it was worth is their floor now."""
        if (rank := self._ranks[None].get(node_id)) is not None:
            for scope in (None,) if namespaces is None else namespaces:
                self._floors[scope] = max(self._floors[scope], rank[0])

    def shorten(self, node_id: NodeId, kept: float) -> None:
        """A node has lost its end, and what that has given; its place stays. `kept`: the share left."""
        if node_id in self._given:
            self._given[node_id] *= kept

    def remove(self, node: Node) -> None:
        """A node leaves; one that is not here is ignored."""
        self._given.pop(node.node_id, None)
        for scope in (None, node.namespace):
            self._take_out(node.node_id, scope)

    def first(self, namespaces: Collection[str] | None, without: Container[NodeId]) -> NodeId | None:
        """The first of these namespaces (None: of all), and none of `without`."""
        scopes = (None,) if namespaces is None else namespaces
        heads = (self._head(scope, without) for scope in scopes)
        return min((head for head in heads if head is not None), default=(None, None))[1]

    def _head(self, scope: str | None, without: Container[NodeId]) -> tuple[_Rank, NodeId] | None:
        if scope not in self._ranks:
            return None
        ranks, heap, passed = self._ranks[scope], self._heaps[scope], list[tuple[_Rank, NodeId]]()
        while heap and (ranks.get(heap[0][1]) != heap[0][0] or heap[0][1] in without):
            entry = heappop(heap)
            if ranks.get(entry[1]) == entry[0]:
                passed.append(entry)
        head = heap[0] if heap else None
        for entry in passed:
            heappush(heap, entry)
        return head

    def _take_out(self, node_id: NodeId, scope: str | None) -> None:
        """Its entry in the heap is stale from now on."""
        self._ranks[scope].pop(node_id, None)
        if not self._ranks[scope]:
            del self._ranks[scope]
            self._heaps.pop(scope, None)

    def _tidy(self, scope: str | None) -> None:
        """Mostly stale entries: build the heap anew."""
        ranks = self._ranks[scope]
        if len(self._heaps[scope]) > 2 * len(ranks) + _MIN_STALE:
            self._heaps[scope] = [(rank, node_id) for node_id, rank in ranks.items()]
            heapify(self._heaps[scope])
