"""Which replicas take requests, and which of them is next."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare.errors import NoReplicaError
from kvshare.fleet.client import ServedModels, VllmClient
from kvshare.fleet.replica import Fleet, Replica
from kvshare.reasons import Reason
from kvshare.settings import load_settings
from tests.kvshare.fleet.real_control import info_of


def fleet_of(*names: str) -> Fleet:
    """Idle replicas, all of which take requests."""
    replicas = [Replica(name, vllm=None, control=None) for name in names]  # type: ignore[arg-type]  # not asked
    for replica in replicas:
        replica.models = ServedModels(("m",))
    return Fleet(replicas)


def names(fleet: Fleet) -> str:
    return "".join(replica.name for replica in fleet.serving())


def connected(name: str = "a", **changes: Any) -> Replica:
    """One that serves and shares, but for these fields of its info."""
    (replica,) = fleet_of(name).replicas
    replica.info, replica.is_connected = info_of(**changes), True
    return replica


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


class TestFleet:
    """All of them."""

    def test_images_are_shared_if_each_that_shares_can(self) -> None:
        """One that shares nothing does not count; where none shares, none are."""
        can, cannot, passing = connected(can_share_media=True), connected(), connected(passing="drafts")
        assert Fleet([can, passing]).shares_media
        assert not Fleet([can, cannot]).shares_media
        assert not Fleet([passing]).shares_media
        assert not Fleet([]).shares_media

    def test_why_none_shares_is_said_by_those_that_serve(self) -> None:
        """Drafts that are not handled; a refusal is like no connector: doctor and the log say which."""
        passing, refused = connected(passing="drafts"), connected(refusals=("no",), passing="drafts")
        assert Fleet([passing]).why_none_shares is Reason.SPECULATION
        assert Fleet([refused, passing]).why_none_shares is Reason.SPECULATION
        assert Fleet([refused]).why_none_shares is Reason.NO_CONNECTOR
        assert fleet_of("a").why_none_shares is Reason.NO_CONNECTOR
        passing.models = None
        assert Fleet([passing]).why_none_shares is Reason.NO_CONNECTOR

    def test_a_failed_request_goes_to_one_that_was_not_tried(self) -> None:
        """The idlest of those; none is an error."""
        fleet = fleet_of("a", "b", "c")
        a, b, c = fleet.replicas
        b.num_inflight = 2
        assert fleet.idlest() is a
        assert fleet.idlest(without=[a]) is c
        assert fleet.idlest(without=[a, c]) is b
        with pytest.raises(NoReplicaError):
            fleet.idlest(without=[a, b, c])

    def test_names_of_a_model_may_come_in_any_order(self, caplog: pytest.LogCaptureFixture) -> None:
        """A model may have several; one that lists nothing serves another one."""
        fleet = fleet_of("a", "b")
        a, b = fleet.replicas
        for models, refusal in (
            (ServedModels(("m", "n")), None),
            (ServedModels(("n", "m")), None),
            (ServedModels(()), "serves nothing, the others serve m, n"),
        ):
            replica = a if fleet.models is None else b
            replica.models = models
            if fleet.models is None:
                b.models = None
            fleet.check_models(replica)
            assert replica.refusal == refusal
        assert "replica b gets no requests: it serves nothing" in caplog.text

    @pytest.mark.parametrize(("size", "is_said"), [(1, False), (2, False), (3, True)])
    def test_ranks_that_get_no_requests_are_said(
        self, size: int, is_said: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Two of them are replicas here."""
        fleet = fleet_of("a-dp0", "a-dp1", "b")
        settings = load_settings().vllm
        for replica, url in zip(fleet.replicas, ("http://a", "http://a", "http://b"), strict=True):
            replica.vllm = VllmClient(url, settings)
        first = fleet.replicas[0]
        first.info = info_of(data_parallel_size=size)
        fleet.check_ranks(first)
        assert ("--vllm-data-parallel-size 3" in caplog.text) is is_said


@pytest.mark.parametrize(("other", "is_said"), [("s", False), ("t", True), ("", False)])
def test_two_names_of_a_store_are_said(other: str, is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that one has stored is in the other's namespaces, and nobody would see why."""
    fleet = Fleet([connected("a"), connected("b")])
    for replica, store in zip(fleet.replicas, ("s", other), strict=True):
        replica.info = info_of(shared_store=store)
    fleet.check_stores(fleet.replicas[0])
    assert ("stores of different addresses" in caplog.text) is is_said
