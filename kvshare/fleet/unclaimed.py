"""Prompts of which no replica has said yet that it holds their KV, and that may not be evicted for that."""

from __future__ import annotations

from collections.abc import Iterable

from delta_tree import NodeId


class Unclaimed(set[NodeId]):
    """
    Those of the last run, until their replicas are connected; and those that a replica may still find in a
    store, until it has looked at all of it.
    """

    def __init__(self, node_ids: Iterable[NodeId]) -> None:
        super().__init__(node_ids)
        self._awaited: dict[str, set[NodeId]] = {}  # by replica

    def wait_for(self, replica: str, node_id: NodeId) -> None:
        self._awaited.setdefault(replica, set()).add(node_id)
        self.add(node_id)

    def end_waiting(self, replica: str) -> bool:
        """It finds no more. Returns whether there are prompts that have waited in vain."""
        awaited = self._awaited.pop(replica, set()) & self
        self.difference_update(awaited - self._all_awaited())
        return bool(awaited)

    def give_up(self) -> None:
        """No replica is waited for any more, but for those that still look."""
        self.intersection_update(self._all_awaited())

    def _all_awaited(self) -> set[NodeId]:
        return set[NodeId]().union(*self._awaited.values())
