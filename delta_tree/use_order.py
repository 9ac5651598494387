"""Who was used last: one order over all nodes, one per namespace, each kept by moving a node to its end."""

from collections import defaultdict
from collections.abc import Collection, Container
from itertools import count

from delta_tree.node import Node, NodeId


class UseOrder:
    """Nodes that may be evicted, least recently used first. Each step takes the same time at any size."""

    def __init__(self) -> None:
        # Dictionaries keep the order of insertion: taken out and put in again, a node is the last.
        self._orders: defaultdict[str | None, dict[NodeId, int]] = defaultdict(dict)  # of all: under None
        self._places = count()

    def put(self, node: Node) -> None:
        """A node moves to the end; a pinned one is not in the order."""
        self.remove(node)
        if not node.pinned:
            place = next(self._places)
            for scope in (None, node.namespace):
                self._orders[scope][node.node_id] = place

    def remove(self, node: Node) -> None:
        """A node leaves; one that is not here is ignored."""
        for scope in (None, node.namespace):
            self._orders[scope].pop(node.node_id, None)
            if not self._orders[scope]:
                del self._orders[scope]

    def first(self, namespaces: Collection[str] | None, without: Container[NodeId]) -> NodeId | None:
        """The first of these namespaces (None: of all), and none of `without`."""
        scopes = (None,) if namespaces is None else namespaces
        heads = (self._head(scope, without) for scope in scopes)
        return min(filter(None, heads), default=(0, None))[1]

    def _head(self, scope: str | None, without: Container[NodeId]) -> tuple[int, NodeId] | None:
        order = self._orders.get(scope, {})
        return next(((place, node_id) for node_id, place in order.items() if node_id not in without), None)
