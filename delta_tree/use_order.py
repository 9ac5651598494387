"""Who was used last: one order over all nodes, one per namespace, each kept by moving a node to its end."""

from collections import defaultdict
from collections.abc import Iterator

from delta_tree.node import Node, NodeId


class UseOrder:
    """Nodes that may be evicted, least recently used first. Each step takes the same time at any size."""

    def __init__(self) -> None:
        # Dictionaries keep the order of insertion: taken out and put in again, a node is the last.
        self._orders: defaultdict[str | None, dict[NodeId, None]] = defaultdict(dict)  # of all: under None

    def put(self, node: Node) -> None:
        """A node was used now; a pinned one is not in the order."""
        self.remove(node)
        if not node.pinned:
            for scope in (None, node.namespace):
                self._orders[scope][node.node_id] = None

    def remove(self, node: Node) -> None:
        """A node leaves; one that is not here is ignored."""
        for scope in (None, node.namespace):
            self._orders[scope].pop(node.node_id, None)
            if not self._orders[scope]:
                del self._orders[scope]

    def ids(self, namespace: str | None = None) -> Iterator[NodeId]:
        """Least recently used first. Not to be changed while somebody iterates."""
        return iter(self._orders.get(namespace, ()))
