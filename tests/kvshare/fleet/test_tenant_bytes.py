"""How much KV each tenant has, kept beside every change of the tree."""

from __future__ import annotations

import threading

from kvshare.admin import Evict
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.namespace import Owner
from kvshare.sharing.tenant_budget import bytes_by_tenant, group_tenants
from tests.kvshare.fleet.reports import offer, prompt, whole


def test_bytes_of_tenants_are_those_of_their_namespaces(keeper: ReplicaKeeper) -> None:
    """Whether a tenant was known before its prompt was stored or after it, and after evictions and purges."""

    def check() -> None:
        group_tenants(keeper.tree, keeper.tenants)
        counted = {
            tenant: sum(keeper.tree.stats(each).num_bytes for each in keeper.tenants.namespaces_of(tenant))
            for tenant in ("acme", "globex")
        }
        assert bytes_by_tenant(keeper.tree) == {
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
    keeper.tree.purge_nodes(node.node_id for node in keeper.tree.nodes("space 4"))
    check()
    keeper.execute(Evict(all=True, dry_run=False))
    assert bytes_by_tenant(keeper.tree) == {}


def test_bytes_of_tenants_wait_for_no_writer(keeper: ReplicaKeeper) -> None:
    """A scrape is on the event loop, and a writer may hold the tree for as long as its disk takes."""
    keeper.tenants.note("space", Owner("acme", "tenant"))
    assert offer(keeper, whole(), prompt(1), namespace="space")
    keeper.tenants.note("later", Owner("acme", "tenant"))
    found: list[dict[str, int]] = []
    scrape = threading.Thread(target=lambda: found.append(bytes_by_tenant(keeper.tree)), daemon=True)
    with keeper.tree._lock:
        scrape.start()
        scrape.join(60)
    assert [each.keys() for each in found] == [{"acme"}]
