"""Which replicas take requests, and which of them is next."""

from __future__ import annotations

from delta_tree import SegmentId
from kvshare.fleet.client import ServedModels
from kvshare.fleet.replica import Fleet, Replica
from kvshare.fleet.routed_request import Incoming, RoutedRequest
from kvshare.namespace import Owner
from kvshare.sharing.rates import Rates
from kvshare.vllm_protocol.messages import Dropped
from kvshare.vllm_protocol.places import Moved


def fleet_of(*names: str) -> Fleet:
    """Idle replicas, all of which take requests."""
    replicas = [Replica(name, vllm=None, control=None) for name in names]  # type: ignore[arg-type]  # not asked
    for replica in replicas:
        replica.models = ServedModels(("m",))
    return Fleet(replicas)


def names(fleet: Fleet) -> str:
    return "".join(replica.name for replica in fleet.serving())


def test_asking_who_serves_does_not_change_who_is_next() -> None:
    """`/ready` and `/metrics` ask as well, and must not shift requests to other replicas."""
    fleet = fleet_of("a", "b", "c")
    assert [names(fleet), names(fleet)] == ["abc", "abc"]
    fleet.sharing()
    assert names(fleet) == "abc"


def test_equally_idle_replicas_take_turns() -> None:
    """Each request that is sent advances the rotation by one replica."""
    fleet = fleet_of("a", "b", "c")
    found = []
    for _ in range(4):
        found.append(names(fleet))
        fleet.advance_rotation()
    assert found == ["abc", "bca", "cab", "abc"]


def test_a_model_that_changes_everywhere_leaves_no_replica_behind() -> None:
    """The first one to serve the new model is refused, and admitted when the others follow."""
    fleet = fleet_of("a", "b")
    first, last = fleet.replicas
    fleet.check_models(last)
    for replica in (first, last):
        replica.models = ServedModels(("n",))  # restarted
        fleet.check_models(replica)
        if replica is first:
            assert (names(fleet), first.refusal) == ("b", "serves n, the others serve m")
            last.models = None
    assert sorted(names(fleet)) == ["a", "b"]
    assert fleet.models == ServedModels(("n",))


def test_the_idlest_replica_comes_first() -> None:
    """Rotation decides between equals only, and a replica that takes no requests is not listed."""
    fleet = fleet_of("a", "b", "c")
    fleet.replicas[0].num_inflight = 1
    fleet.replicas[1].models = None
    assert names(fleet) == "ca"


def test_a_replica_knows_what_lies_in_its_blocks() -> None:
    """As its connector reports it; what came again after it had left is there."""
    (replica,) = fleet_of("a").replicas
    one, two, three = (SegmentId(number) for number in (1, 2, 3))
    replica.note_places(Moved((one, two)))
    replica.note_places(Moved((three, one), (one, two)))
    replica.note_places(Dropped((three,)))
    rates = Rates.linear(1e4, 1e9)
    assert [each in replica.queue(rates).in_blocks for each in (one, two, three)] == [True, False, False]


def test_a_prefill_is_alone_if_no_other_one_overlaps_it() -> None:
    """Whichever of the two began first. One whose first token has come disturbs no other."""
    (replica,) = fleet_of("a").replicas
    requests = [RoutedRequest(Incoming(Owner("t", "tenant"))) for _ in range(4)]
    first, second, third, fourth = requests
    with replica.computing(first):
        with replica.computing(second):
            assert not first.progress.was_alone
            second.note_prefilled()
        first.note_prefilled()
        with replica.computing(third):
            pass
        with replica.computing(fourth):
            assert fourth.progress.sent_at > third.progress.sent_at > 0
    assert [each.progress.was_alone for each in requests] == [False, False, True, True]
    assert not replica.requests
