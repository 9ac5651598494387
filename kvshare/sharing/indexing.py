"""Keeps the index in step with the tree: stored prompts are added, evicted ones removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from delta_tree import Node
from kvshare.sharing.keeper import PromptKeeper, TierT
from kvshare.telemetry import Component, FallbackReason
from vector_index import Failure, Nominator, PromptRecord, PromptText


class Indexing:
    """Indexes the prompts of one tree. Failures are only counted: the prompt is then not nominated."""

    def __init__(self, keeper: PromptKeeper[TierT], nominator: Nominator) -> None:
        self._keeper = keeper
        self._nominator = nominator

    async def remember(self, node: Node, text: PromptText | None) -> None:
        """Remove evicted nodes from the index, and add a node; without `text` it gets no embedding."""
        await self.forget_evicted()
        await self._index(node, text)

    async def remember_all(self, nodes: Sequence[Node]) -> None:
        """Index many prompts, without embeddings; then remove those that were evicted while this ran."""
        get = self._keeper.tree.get
        records = (
            PromptRecord(int(node.node_id), node.namespace, now.token_ids)
            for node in nodes
            if (now := get(node.node_id)) is not None
        )
        self.count(await self._nominator.remember_all(records))
        await self.forget((node.namespace, node.node_id) for node in nodes if get(node.node_id) is None)

    async def _index(self, node: Node, text: PromptText | None) -> None:
        stored = self._keeper.tree.get(node.node_id)
        if stored is None:
            return
        if stored.num_tokens < node.num_tokens:  # shortened while the text waited to be embedded
            text = None
        self.count(await self._nominator.remember(node.node_id, node.namespace, stored.token_ids, text))
        now = self._keeper.tree.get(node.node_id)
        if now is None:  # evicted while it was indexed
            await self.forget([(node.namespace, node.node_id)])
        elif now.num_tokens < stored.num_tokens:
            await self._index(now, None)

    async def forget_evicted(self) -> list[tuple[str, int]]:
        """
        Remove evicted prompts from the index, and index shortened ones again.

        Returns: namespace and id of the evicted prompts
        """
        evicted = self._keeper.take_evicted()
        await self.forget(evicted)
        for node in self._keeper.take_shortened():
            # Without an embedding: the embedding of the whole prompt does not fit its beginning.
            await self._index(node, None)
        return evicted

    async def forget(self, nodes: Iterable[tuple[str, int]]) -> None:
        """Remove nodes from the index. Stale entries are never used, but they displace usable donors."""
        by_namespace: dict[str, list[int]] = {}
        for namespace, node_id in nodes:
            by_namespace.setdefault(namespace, []).append(node_id)
        for namespace, node_ids in by_namespace.items():
            self.count(await self._nominator.forget(namespace, node_ids))

    def count(self, failures: Iterable[Failure]) -> None:
        """Count the parts of the index that failed in a search or in indexing a prompt."""
        for failure in failures:
            self._keeper.telemetry.fallback(Component(failure.component), FallbackReason(failure.reason))
