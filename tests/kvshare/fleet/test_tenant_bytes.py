"""How much KV each tenant has, kept beside every change of the tree."""

from __future__ import annotations

from kvshare.admin import Evict
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.namespace import Owner
from kvshare.sharing.tenant_budget import bytes_by_tenant
from tests.kvshare.fleet.reports import offer, prompt, whole


def test_bytes_of_tenants_are_those_of_their_namespaces(keeper: ReplicaKeeper) -> None:
    """Whether a tenant was known before its prompt was stored or after it, and after evictions and purges."""

    def check() -> None:
        counted = {
            tenant: sum(keeper.tree.stats(each).num_bytes for each in keeper.tenants.namespaces_of(tenant))
            for tenant in ("acme", "globex")
        }
        assert bytes_by_tenant(keeper.tree, keeper.tenants) == {
            tenant: num_bytes for tenant, num_bytes in counted.items() if num_bytes
        }

    for number in range(6):
        owner = Owner("globex" if number % 3 else "acme", "tenant").divided(f"{number}")
        if number < 3:
            keeper.tenants.note(f"space {number}", owner)
        assert offer(keeper, whole(), prompt(number), namespace=f"space {number}", max_bytes=2500)
        check()
        keeper.tenants.note(f"space {number}", owner)
        check()
    keeper.tree.purge("space 4")
    check()
    keeper.execute(Evict(all=True, dry_run=False))
    assert bytes_by_tenant(keeper.tree, keeper.tenants) == {}
