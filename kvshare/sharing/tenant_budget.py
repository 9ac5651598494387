"""The KV of one tenant as a memory with a limit of its own: above it, the tenant's own prompts leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from delta_tree import DeltaTree, SegmentId, UnknownSegmentError
from kvshare.tenants import Tenants


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """A `Budget`: all KV of these namespaces, in every memory and on disk."""

    tree: DeltaTree
    namespaces: Collection[str]
    max_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(self.tree.stats(namespace).num_bytes for namespace in self.namespaces)

    def __contains__(self, segment_id: SegmentId) -> bool:
        try:
            return self.tree.segment(segment_id).namespace in self.namespaces
        except UnknownSegmentError:
            return False


def budget_of(tree: DeltaTree, tenants: Tenants, namespace: str) -> TenantBudget | None:
    """The budget of the tenant whose namespace it is; None if that has no limit, or is not known."""
    owner = tenants.owner_of(namespace)
    max_bytes = None if owner is None else tenants.max_bytes(owner.tenant)
    if owner is None or max_bytes is None:
        return None
    return TenantBudget(tree, frozenset(tenants.namespaces_of(owner.tenant)), max_bytes)


def bytes_by_tenant(tree: DeltaTree, tenants: Tenants) -> Counter[str]:
    """The bytes of KV of each tenant whose namespaces are known."""
    sums: Counter[str] = Counter()
    for namespace, owner in tenants.all().items():
        if num_bytes := tree.stats(namespace).num_bytes:
            sums[owner.tenant] += num_bytes
    return sums
