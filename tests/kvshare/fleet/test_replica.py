"""The state of one replica: what it may be asked, what is before a request, and how it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delta_tree import SegmentId
from kvshare.fleet.client import ServedModels
from kvshare.fleet.replica import Fleet, Replica
from kvshare.fleet.routed_request import Incoming, Routed, RoutedRequest
from kvshare.namespace import Owner
from kvshare.part_problems import PartProblem
from kvshare.parts import ServedPart
from kvshare.requests import Prompt
from kvshare.sharing.plan import NoPlan
from kvshare.sharing.rates import Rates
from kvshare.vllm_protocol.messages import RANK_HEADER, Dropped
from kvshare.vllm_protocol.places import DiskProblem, Moved
from tests.kvshare.fleet.plans import OWNER, PLAN, PROMPT
from tests.kvshare.fleet.real_control import FIELDS, info_of
from vector_index import PromptText


def fleet_of(*names: str) -> Fleet:
    """Idle replicas, all of which take requests."""
    replicas = [Replica(name, vllm=None, control=None) for name in names]  # type: ignore[arg-type]  # not asked
    for replica in replicas:
        replica.models = ServedModels(("m",))
    return Fleet(replicas)


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


def connected(name: str = "a", **changes: Any) -> Replica:
    """One that serves and shares, but for these fields of its info."""
    (replica,) = fleet_of(name).replicas
    replica.info, replica.is_connected = info_of(**changes), True
    return replica


def test_plans_are_made_for_one_that_serves_is_connected_and_shares() -> None:
    """Each alone is not enough."""
    assert connected().shares
    for spoil in (
        lambda replica: setattr(replica, "models", None),
        lambda replica: setattr(replica, "refusal", "serves another model"),
        lambda replica: setattr(replica, "is_connected", False),
        lambda replica: setattr(replica, "info", None),
        lambda replica: setattr(replica, "info", info_of(refusals=("no",))),
        lambda replica: setattr(replica, "info", info_of(passing="drafts")),
    ):
        spoil(replica := connected())
        assert not replica.shares
        assert Fleet([replica]).sharing() == []


@pytest.mark.parametrize(
    ("spoil", "problem", "cause"),
    [
        ({}, None, ""),
        (
            {"refusal": "serves n, the others serve m"},
            PartProblem.REPLICA_REFUSED,
            "it serves n, the others serve m",
        ),
        ({"models": None}, PartProblem.REPLICA_SILENT, ""),
        ({"is_connected": False}, PartProblem.REPLICA_NO_CONNECTOR, "its connector has not answered yet"),
        (
            {"is_connected": False, "connector_problem": "no answer in time"},
            PartProblem.REPLICA_NO_CONNECTOR,
            "no answer in time",
        ),
        ({"info": None}, PartProblem.REPLICA_NO_CONNECTOR, "its connector has not answered yet"),
        ({"info": info_of(refusals=("a", "b"), passing="c")}, PartProblem.REPLICA_UNSHARED, "a; b; c"),
        ({"info": info_of(warnings=("slow", "old"))}, PartProblem.REPLICA_WARNS, "slow; old"),
        (
            {"models": None, "info": info_of(warnings=("slow",))},
            PartProblem.REPLICA_SILENT,
            "",
        ),  # what matters most
    ],
)
def test_an_operator_reads_what_is_wrong_with_it(
    spoil: dict[str, Any], problem: PartProblem | None, cause: str
) -> None:
    """In one line, of which the list of parts has the words."""
    replica = connected("10.0.0.1:8000")
    replica.public_name = "1"
    for name, value in spoil.items():
        setattr(replica, name, value)
    (reading,) = replica.readings()
    assert (reading.problem, reading.cause) == (problem, cause)
    assert (reading.name, reading.public_name) == ("10.0.0.1:8000", "1")


@pytest.mark.parametrize(
    ("problem", "of_part"),
    [
        (DiskProblem(), None),
        (DiskProblem("full"), PartProblem.DISK_REPLICA_NOT_WRITTEN),
        (DiskProblem("other weights", is_lasting=True), PartProblem.DISK_REPLICA_GIVEN_UP),
    ],
)
def test_a_disk_is_a_part_of_its_own(problem: DiskProblem, of_part: PartProblem | None) -> None:
    """By the name of its replica; changes come by the journal."""
    replica = connected(max_disk_bytes=10)
    replica.note_disk(problem)
    _, disk = replica.readings()
    assert (disk.part, disk.name) == (ServedPart.DISK, "a")
    assert (disk.problem, disk.cause) == (of_part, problem.reason)


def request(plan: Any) -> RoutedRequest:
    return RoutedRequest(Incoming(OWNER, Prompt(PROMPT, PromptText("", ""))), Routed(plan))


def test_what_is_before_a_request_is_what_its_replica_has_to_load_and_compute() -> None:
    """By the plans, and in full where there are none; without those whose first token has come."""
    replica, rates = connected(), Rates.linear(1000.0, 1e9)
    assert (replica.queue(rates).loading_s, replica.queue(rates).computing_s) == (0.0, 0.0)
    near, full, done, relayed = (
        request(PLAN),
        request(NoPlan()),
        request(PLAN),
        RoutedRequest(Incoming(OWNER)),
    )
    done.note_prefilled()
    replica.requests |= {near, full, done, relayed}
    queue = replica.queue(rates)
    assert queue.loading_s == PLAN.estimate.load_s
    assert queue.computing_s == pytest.approx(PLAN.estimate.compute_s + rates.full_s(100))
    assert set(replica.being_prefilled()) == {near, full, relayed}


def test_a_request_that_fails_is_not_before_the_next_one() -> None:
    """Whatever ends it."""
    replica = connected()
    with pytest.raises(OSError, match="gone"), replica.computing(request(PLAN)):
        raise OSError("gone")
    assert not replica.requests


def test_each_replica_has_a_namespace_but_for_those_that_share_a_store() -> None:
    """And each owner, and each model."""
    apart = connected("a"), connected("b")
    assert len({each.namespace(OWNER).digest for each in apart}) == 2
    store = connected("a", shared_store="s"), connected("b", shared_store="s")
    assert len({each.namespace(OWNER).digest for each in store}) == 1
    assert [each.holder for each in (*apart, *store)] == ["a", "b", "s", "s"]
    assert [each.shares_store for each in (*apart, *store)] == [False, False, True, True]
    (replica, _), seen = store, {store[0].namespace(OWNER).digest}
    seen.add(replica.namespace(Owner("globex", "tenant")).digest)
    seen.add(replica.namespace(OWNER.divided("salt")).digest)
    for name in FIELDS:
        replica.info = info_of(shared_store="s", namespace_fields={**FIELDS, name: "other"})
        seen.add(replica.namespace(OWNER).digest)
    assert len(seen) == 3 + len(FIELDS)


@pytest.mark.parametrize(("rank", "headers"), [(None, {}), (0, {RANK_HEADER: "0"}), (3, {RANK_HEADER: "3"})])
def test_a_request_names_its_rank_once_that_is_known(rank: int | None, headers: dict[str, str]) -> None:
    """Rank 0 is one, too."""
    replica = connected(data_parallel_rank=rank)
    assert replica.headers == headers
    replica.info = None
    assert replica.headers == {}


@pytest.mark.parametrize(("method", "speculates"), [("", False), ("ngram", True)])
def test_one_that_drafts_says_with_which_method(method: str, speculates: bool) -> None:
    assert connected(speculation=method).speculates is speculates
    assert not fleet_of("a").replicas[0].speculates


def test_a_lost_infos_disk_is_no_part() -> None:
    """Its connector says what it has when it is back."""
    replica = connected(max_disk_bytes=10)
    assert len(list(replica.readings())) == 2
    replica.info = None
    assert [each.part for each in replica.readings()] == [ServedPart.REPLICA]
    assert replica.info is None
    replica.info = replace(info_of(), max_disk_bytes=0)
    assert len(list(replica.readings())) == 1
