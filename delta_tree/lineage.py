"""
Which prompt is the parent of which. Removing a prompt updates one dictionary entry per descendant.

This file knows ids only; forest.py has the prompts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from delta_tree.node import NodeId


class Lineage:
    """Parents, children and depths. A root has depth 1."""

    def __init__(self) -> None:
        self._parents: dict[NodeId, NodeId] = {}
        # Dictionaries as ordered sets: a template may have a hundred thousand children.
        self._children: dict[NodeId, dict[NodeId, None]] = {}
        self._depths: dict[NodeId, int] = {}

    def ancestors(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Return the ancestors, the nearest first; none for a root."""
        node_ids: list[NodeId] = []
        parent = self._parents.get(node_id)
        while parent is not None:
            node_ids.append(parent)
            parent = self._parents.get(parent)
        return tuple(node_ids)

    def parent(self, node_id: NodeId) -> NodeId | None:
        """Return the parent; None for a root."""
        return self._parents.get(node_id)

    def is_root(self, node_id: NodeId) -> bool:
        return node_id not in self._parents

    def children(self, node_id: NodeId) -> tuple[NodeId, ...]:
        return tuple(self._children.get(node_id, ()))

    def subtree(self, node_id: NodeId) -> list[NodeId]:
        """Return a node and all its descendants."""
        node_ids = [node_id]
        for seen in node_ids:
            node_ids.extend(self._children.get(seen, ()))
        return node_ids

    def add(self, node_id: NodeId, parent: NodeId | None) -> Counter[int]:
        """Add a node below a known one, or as a root; returns how many more nodes each depth has now."""
        depth = 1
        if parent is not None:
            depth += self._depths[parent]
            self._parents[node_id] = parent
            self._children.setdefault(parent, {})[node_id] = None
        self._depths[node_id] = depth
        return Counter({depth: 1})

    def remove(self, node_id: NodeId) -> Counter[int]:
        """Remove a node; its children move to its parent, or become roots. Returns changes as `add` does."""
        grown = Counter({self._depths[node_id]: -1})
        for below in self.subtree(node_id)[1:]:
            depth = self._depths[below]
            self._depths[below] = depth - 1
            grown[depth] -= 1
            grown[depth - 1] += 1
        del self._depths[node_id]
        children = self._children.pop(node_id, {})
        parent = self._parents.pop(node_id, None)
        if parent is None:
            for child in children:
                del self._parents[child]
            return grown
        self._parents.update(dict.fromkeys(children, parent))
        siblings = self._children[parent]
        del siblings[node_id]
        siblings.update(children)
        if not siblings:
            del self._children[parent]
        return grown

    def heirs(self, leaving: Iterable[NodeId]) -> Mapping[NodeId, NodeId]:
        """Return for each removed node with children its nearest ancestor that stays, if there is one."""
        heirs: dict[NodeId, NodeId | None] = dict.fromkeys(leaving)
        for node_id in heirs:
            above = self._parents.get(node_id)
            while above in heirs:
                above = heirs[above] or self._parents.get(above)
            heirs[node_id] = above
        return {gone: heir for gone, heir in heirs.items() if heir is not None and gone in self._children}
