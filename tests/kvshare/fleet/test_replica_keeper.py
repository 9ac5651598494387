"""The tree stays in step with what replicas hold, one account for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_tree import (
    DeltaTree,
    Node,
    SegmentId,
    new_segment_id,
)
from kvshare.admin import Evict, Pin
from kvshare.errors import RequestError
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.namespace import Owner
from kvshare.sharing.tenant_budget import group_of
from kvshare.telemetry import EvictionCause
from kvshare.vllm_protocol.messages import FinishedReport, StoredSegment
from tests.kvshare.fleet.reports import offer, prompt, whole


def store(keeper: ReplicaKeeper, seed: int, *, replica: str = "a") -> Node:
    node = offer(keeper, whole(), prompt(seed), replica=replica)
    assert node is not None
    return node


def test_pins_are_bounded_by_the_replica_that_has_the_kv(keeper: ReplicaKeeper) -> None:
    """Half of each replica's memory: what is pinned at one does not count at another."""
    for replica in "ab":
        for seed in range(2):
            node = offer(keeper, whole(), prompt(seed), replica=replica, max_bytes=1500)
            assert node is not None
            if seed == 0:
                keeper.execute(Pin(node=node.node_id))
            else:
                with pytest.raises(
                    RequestError, match="1,000 bytes of KV would be pinned, 500 are; at most 750"
                ):
                    keeper.execute(Pin(node=node.node_id))
    assert keeper.pins() == {"num_bytes": 1000, "max_bytes": 1500}


def test_a_pinned_prompt_is_not_evicted_at_its_replica(keeper: ReplicaKeeper) -> None:
    """Others leave; where the replica has dropped it by itself, no pin brings its KV back."""
    first = offer(keeper, whole(), prompt(1), max_bytes=1500)
    assert first is not None
    keeper.execute(Pin(node=first.node_id))
    for seed in range(2, 9):
        assert offer(keeper, whole(), prompt(seed), max_bytes=1500) is not None
    assert keeper.tree.node(first.node_id).pinned
    keeper.forget(first.pieces.segment_ids)
    assert keeper.tree.get(first.node_id) is None
    assert keeper.pins()["num_bytes"] == 0


def test_pins_of_the_last_run_hold_once_their_replica_is_back(tmp_path: Path) -> None:
    """Until then nothing more of it can be pinned, as nobody knows whether its KV is there."""
    path = tmp_path / "again.sqlite3"
    with DeltaTree.open(path, identity="test") as tree:
        keeper = ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8)
        pinned, other = store(keeper, 1), store(keeper, 2)
        keeper.execute(Pin(node=pinned.node_id))
    with DeltaTree.open(path, identity="test") as tree:
        keeper = ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8)
        with pytest.raises(RequestError, match="not connected"):
            keeper.execute(Pin(node=other.node_id))
        keeper.claim("a", [*pinned.pieces.segment_ids, *other.pieces.segment_ids], max_bytes=2000)
        assert keeper.pins()["num_bytes"] == 500
        keeper.execute(Pin(node=other.node_id))
        assert tree.pinned() == {pinned.node_id, other.node_id}


def test_prompts_of_any_number_of_namespaces_share_a_replicas_memory(keeper: ReplicaKeeper) -> None:
    """
    A client's salts make as many as it likes. The prompt that was not used for longest leaves each time, of
    whichever namespace, and nothing is kept of namespaces without prompts.
    """
    nodes = []
    for number in range(40):
        node = offer(keeper, whole(), prompt(number), namespace=f"salt {number}", max_bytes=1500)
        assert node is not None
        nodes.append(node.node_id)
        assert [node.node_id for node in keeper.tree.nodes()] == nodes[-3:]
    other = offer(keeper, whole(), prompt(1), replica="b", namespace="salt b", max_bytes=1500)
    assert other is not None
    order = keeper.tree._forest.eviction_order
    assert set(order._groups_of) == {"salt 37", "salt 38", "salt 39", "salt b"}
    assert set(order._queues) == {None, "a", "b", group_of("acme"), *order._groups_of}
    assert set(order._floors) == {"a"}


def test_a_tenant_above_its_bytes_evicts_its_own_prompts(keeper: ReplicaKeeper) -> None:
    """At its replica, and at others: the limit is for all. Another tenant's prompts and pinned ones stay."""
    for namespace in ("shared", "salted"):
        keeper.tenants.note(namespace, Owner("acme", "tenant"))
    keeper.tenants.note("other", Owner("globex", "tenant"))
    keeper.tenants.use_limits({"acme": 1000}.get)
    other = offer(keeper, whole(), prompt(0), namespace="other", max_bytes=5000)
    first = offer(keeper, whole(), prompt(1), namespace="shared", max_bytes=5000)
    second = offer(keeper, whole(), prompt(2), replica="b", namespace="salted", max_bytes=5000)
    third = offer(keeper, whole(), prompt(3), namespace="salted", max_bytes=5000)
    assert first is not None
    assert second is not None
    assert third is not None
    assert other is not None
    assert {node.node_id for node in keeper.tree.nodes()} == {other.node_id, second.node_id, third.node_id}
    assert keeper.telemetry.counts().evictions[EvictionCause.QUOTA] == 1
    assert sum(keeper.telemetry.counts().tenant_evictions.values()) == 1
    keeper.execute(Pin(node=second.node_id))
    keeper.execute(Pin(node=third.node_id))
    assert offer(keeper, whole(), prompt(4), namespace="shared", max_bytes=5000) is None
    keeper.tenants.use_limits({"acme": 0}.get)
    assert offer(keeper, whole(), prompt(5), namespace="shared", max_bytes=5000) is None
    assert len(keeper.tree.nodes()) == 3


def test_evictions_of_one_tenant_give_its_prompts_no_rank_before_others(keeper: ReplicaKeeper) -> None:
    """However many it has had: those that are not used leave first when another tenant needs room."""
    keeper.tenants.note("busy", Owner("acme", "tenant"))
    keeper.tenants.note("quiet", Owner("globex", "tenant"))
    keeper.tenants.use_limits({"acme": 1000}.get)
    for number in range(20):
        assert offer(keeper, whole(), prompt(number), namespace="busy", max_bytes=1500) is not None
    stored = [
        offer(keeper, whole(), prompt(100 + number), namespace="quiet", max_bytes=1500) for number in range(3)
    ]
    assert None not in stored
    assert {node.namespace for node in keeper.tree.nodes()} == {"quiet"}


def test_what_is_kept_counts_for_its_replica(keeper: ReplicaKeeper) -> None:
    """Segments and bytes, in all and by name."""
    store(keeper, 1)
    store(keeper, 2, replica="b")
    tier = keeper.tier
    assert (len(tier.memories["a"].segments), tier.memories["b"].num_bytes, tier.num_bytes) == (1, 500, 1000)


def test_the_same_prompt_again_is_dropped_over_there(keeper: ReplicaKeeper) -> None:
    """One node; the replica is told which of the two copies it may let go of."""
    told: list[str] = []
    keeper.tier.call_on_drop(told.append)
    store(keeper, 1)
    again = whole()
    assert offer(keeper, again, prompt(1)) is None
    assert keeper.tier.take_dropped("a") == [again.stored[0].segment_id]
    assert keeper.tier.take_dropped("a") == []
    assert told == ["a"]


def test_short_prompts_are_not_kept(keeper: ReplicaKeeper) -> None:
    """Nothing would ever be planned from them."""
    assert offer(keeper, whole(5), prompt(1, 5)) is None
    assert len(keeper.tier.take_dropped("a")) == 1


def test_the_least_recently_used_prompt_leaves_for_a_new_one(keeper: ReplicaKeeper) -> None:
    """Of this replica, and none that a ticket refers to; the replica is told what it may let go of."""
    others, first, second, third = store(keeper, 1, replica="b"), *(store(keeper, seed) for seed in (2, 3, 4))
    keeper.tree.touch(first.node_id)
    assert offer(keeper, whole(), prompt(5), max_bytes=1500, held=[second.node_id]) is not None
    assert keeper.take_evicted() == [("a", third.node_id)]
    assert keeper.tier.take_dropped("a") == list(third.pieces.segment_ids)
    assert keeper.tier.memories["a"].num_bytes == 1500
    assert {others.node_id, first.node_id, second.node_id} <= {node.node_id for node in keeper.tree.nodes()}


def test_a_prompt_loses_its_end_at_its_replica(keeper: ReplicaKeeper) -> None:
    """The replica drops the last segment. What it drops of the rest by itself takes the prompt along."""
    parts = tuple(StoredSegment(new_segment_id(), start, 25, 250) for start in (0, 25))
    node = offer(keeper, FinishedReport("r", "full", None, stored=parts), prompt(1))
    assert node is not None
    assert offer(keeper, whole(), prompt(2), max_bytes=900) is not None
    assert keeper.tier.take_dropped("a") == [parts[1].segment_id]
    assert keeper.tree.node(node.node_id).num_tokens == 25
    assert [shorter.node_id for shorter in keeper.take_shortened()] == [node.node_id]
    keeper.forget([parts[1].segment_id])
    assert keeper.tree.get(node.node_id) is not None
    keeper.forget([parts[0].segment_id])
    assert keeper.tree.get(node.node_id) is None


def test_what_finds_no_room_is_dropped_over_there(keeper: ReplicaKeeper) -> None:
    """Nobody is evicted for what would not fit all the same."""
    donor, other = store(keeper, 1), store(keeper, 2)
    finished = whole()
    assert offer(keeper, finished, prompt(3), max_bytes=900, held=[donor.node_id]) is None
    assert keeper.tier.take_dropped("a") == [finished.stored[0].segment_id]
    assert {node.node_id for node in keeper.tree.nodes()} == {donor.node_id, other.node_id}


def test_a_known_prompt_evicts_nobody(keeper: ReplicaKeeper) -> None:
    """It counts as used, and what was retained of it again is dropped."""
    first, second = store(keeper, 1), store(keeper, 2)
    assert offer(keeper, whole(), prompt(1), max_bytes=1000) is None
    assert keeper.take_evicted() == []
    assert keeper.tree.next_to_evict() == second
    assert keeper.tree.get(first.node_id) is not None


def test_a_drop_that_could_not_be_sent_is_sent_again(keeper: ReplicaKeeper) -> None:
    segments = store(keeper, 1).pieces.segment_ids
    keeper.tier.drop(segments)
    keeper.tier.drop_again("a", keeper.tier.take_dropped("a"))
    assert keeper.tier.take_dropped("a") == list(segments)


def test_a_dropped_segment_takes_its_prompts_along(keeper: ReplicaKeeper) -> None:
    """Pinned ones too: their KV is gone. The others stay, and the index hears of it."""
    gone, stays = store(keeper, 1), store(keeper, 2)
    keeper.tree.pin(gone.node_id)
    keeper.forget(gone.pieces.segment_ids)
    assert [node.node_id for node in keeper.tree.nodes()] == [stays.node_id]
    assert keeper.take_evicted() == [("a", gone.node_id)]
    assert keeper.tier.take_dropped("a") == []


def test_a_lost_replica_takes_only_its_own(keeper: ReplicaKeeper) -> None:
    """The other's prompts are where they were."""
    store(keeper, 1)
    stays = store(keeper, 2, replica="b")
    keeper.lose("a")
    assert [node.node_id for node in keeper.tree.nodes()] == [stays.node_id]
    assert len(keeper.take_evicted()) == 1
    assert keeper.tier.held_by("a") == frozenset()


def test_a_lost_replica_is_lost_on_a_full_disk_too(keeper: ReplicaKeeper) -> None:
    """Nothing needs to be stored for it: after a restart nobody claims its prompts."""
    store(keeper, 1)
    assert keeper.tree._writer._storage is not None
    keeper.tree._writer._storage._open_connection().execute("PRAGMA query_only = ON")
    keeper.lose("a")
    assert keeper.tree.nodes() == ()
    keeper.tree._writer._storage._open_connection().execute("PRAGMA query_only = OFF")


def test_a_prompt_of_the_last_run_gives_way_to_the_same_one(tmp_path: Path) -> None:
    """Its KV is gone with the replica's restart, while others are still waited for."""
    path = tmp_path / "tree.sqlite3"
    with DeltaTree.open(path, identity="test") as tree:
        store(ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8), 1)
    with DeltaTree.open(path, identity="test") as tree:
        keeper = ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8)
        assert keeper.claim("a", [], 10**6) == []
        again = store(keeper, 1)
        assert again.pieces.segment_ids <= keeper.tier.held_by("a")


def test_an_operators_eviction_reaches_the_replica(keeper: ReplicaKeeper) -> None:
    """By the same way as everything that nobody refers to."""
    node = store(keeper, 1)
    keeper.execute(Evict(all=True, dry_run=False))
    assert keeper.tree.nodes() == ()
    assert keeper.tier.take_dropped("a") == list(node.pieces.segment_ids)
    keeper.forget(node.pieces.segment_ids)  # the news of it comes back


def test_a_resync_finds_what_went_unnoticed(keeper: ReplicaKeeper) -> None:
    """What is not held any more leaves; what nobody refers to is an orphan."""
    gone, stays = store(keeper, 1), store(keeper, 2)
    unknown = SegmentId(7)
    assert keeper.claim("a", [*stays.pieces.segment_ids, unknown], 10**6) == []
    assert keeper.tree.get(gone.node_id) is None
    keeper.drop_unreferenced(keeper.tier.held_by("a"))
    assert keeper.tier.take_dropped("a") == [unknown]


def test_the_last_runs_prompts_wait_for_their_replica(tmp_path: Path) -> None:
    """Claimed by whoever holds all of their KV; at the end of the wait the others go."""
    path = tmp_path / "tree.sqlite3"
    with DeltaTree.open(path, identity="test") as tree:
        before = ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8)
        mine, theirs, nobodys = store(before, 1), store(before, 2, replica="b"), store(before, 3)
    with DeltaTree.open(path, identity="test") as tree:
        keeper = ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8)
        claimed = keeper.claim("a", mine.pieces.segment_ids, 10**6)
        assert [node.node_id for node in claimed] == [mine.node_id]
        assert keeper.tier.memories["a"].num_bytes == 500
        keeper.lose("a")  # must not take those along that still wait
        assert {node.node_id for node in tree.nodes()} == {theirs.node_id, nobodys.node_id}
        claimed = keeper.claim("b", theirs.pieces.segment_ids, 10**6)
        assert [node.node_id for node in claimed] == [theirs.node_id]
        keeper.evict_unclaimed()
        assert [node.node_id for node in tree.nodes()] == [theirs.node_id]
        assert {node_id for _, node_id in keeper.take_evicted()} == {mine.node_id, nobodys.node_id}


def test_a_plan_is_told_what_is_missing(keeper: ReplicaKeeper) -> None:
    """The tier has no bytes to give, only the word that they are there."""
    node = store(keeper, 1)
    (held,) = node.pieces.segment_ids
    fetched = keeper.tier.fetch([held, SegmentId(7)])
    assert fetched.segments == {}
    assert fetched.missing == {7}
