"""
The KV of one tenant as a memory with its own limit: above it, prompts of this tenant are evicted.

All namespaces of a tenant are one group of the delta tree. The tree knows the bytes of a group and which of
its prompts to evict first, however many namespaces there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from delta_tree import DeltaTree, SegmentId, UnknownSegmentError
from kvshare.tenants import Tenants

_PREFIX = "tenant\0"  # the prompts of a replica are a group, too: no name of a replica begins like this


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """A `Budget`: all KV of a tenant, in every memory and on disk."""

    tree: DeltaTree
    tenants: Tenants
    tenant: str
    max_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.tree.bytes_of(group_of(self.tenant))

    def __contains__(self, segment_id: SegmentId) -> bool:
        try:
            owner = self.tenants.owner_of(self.tree.segment(segment_id).namespace)
        except UnknownSegmentError:
            return False
        return owner is not None and owner.tenant == self.tenant


def group_of(tenant: str) -> str:
    """Return the name of the tree's group for all namespaces of a tenant."""
    return _PREFIX + tenant


def group_tenants(tree: DeltaTree, tenants: Tenants) -> None:
    """Put each namespace whose tenant has become known into the group of that tenant."""
    for namespace, owner in tenants.take_noted():
        tree.put_into(group_of(owner.tenant), namespace)


def budget_of(tree: DeltaTree, tenants: Tenants, namespace: str) -> TenantBudget | None:
    """Return the budget of a namespace's tenant; None if the tenant has no limit, or is not known."""
    owner = tenants.owner_of(namespace)
    max_bytes = None if owner is None else tenants.max_bytes(owner.tenant)
    if owner is None or max_bytes is None:
        return None
    group_tenants(tree, tenants)
    return TenantBudget(tree, tenants, owner.tenant, max_bytes)


def bytes_by_tenant(tree: DeltaTree) -> dict[str, int]:
    """
    Return the bytes of each tenant with KV, if `group_tenants` knows it. Takes no lock: for the event loop.
    """
    found = tree.bytes_of_groups().items()
    return {group.removeprefix(_PREFIX): size for group, size in found if group.startswith(_PREFIX)}
