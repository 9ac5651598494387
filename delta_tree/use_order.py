"""Who was used last: one order over all nodes, one per namespace, each kept by moving a node to its end."""

from collections.abc import Iterable, Iterator

from delta_tree.node import Node, NodeId


class UseOrder:
    """Nodes that may be evicted, least recently used first. Each step takes the same time at any size."""

    def __init__(self) -> None:
        # Dictionaries keep the order of insertion: taken out and put in again, a node is the last.
        self._all: dict[NodeId, None] = {}
        self._by_namespace: dict[str, dict[NodeId, None]] = {}

    def put(self, node: Node) -> None:
        """A node was used now; a pinned one is not in the order."""
        self.remove(node)
        if not node.pinned:
            self._all[node.node_id] = None
            self._by_namespace.setdefault(node.namespace, {})[node.node_id] = None

    def remove(self, node: Node) -> None:
        """A node leaves; one that is not here is ignored."""
        if node.node_id not in self._all:
            return
        del self._all[node.node_id]
        own = self._by_namespace[node.namespace]
        del own[node.node_id]
        if not own:
            del self._by_namespace[node.namespace]

    def restore(self, nodes: Iterable[Node]) -> None:
        """After a start: in the order of their times."""
        for node in sorted(nodes, key=lambda node: node.last_used_at):
            self.put(node)

    def ids(self, namespace: str | None = None) -> Iterator[NodeId]:
        """Least recently used first. Not to be changed while somebody iterates."""
        return iter(self._all if namespace is None else self._by_namespace.get(namespace, ()))
