"""Where a request goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from delta_tree import token_ids
from kvshare.errors import NoReplicaError
from kvshare.fleet.replica import Replica
from kvshare.fleet.routed_request import Incoming, RoutedRequest
from kvshare.fleet.router import choose
from kvshare.reasons import Reason
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.sharing.control import Rung
from kvshare.sharing.control.blocks import Arm
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Estimate
from kvshare.telemetry import Component, FallbackReason
from kvshare.vllm_protocol.salts import owner_salt, private_salt
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.kvshare.fleet.served_fleet import FORM, OTHER, OWNER, ServedFleet, eventually, serving
from tests.kvshare.sharing.control.on_rung import put_on
from vector_index import PromptText

SETTINGS = load_settings(overrides={"vllm.max_inflight": 10, "vllm.max_imbalance": 4}).vllm


def replica(name: str, num_inflight: int = 0) -> Replica:
    idle = Replica(name, vllm=None, control=None)  # type: ignore[arg-type]  # not asked
    idle.num_inflight = num_inflight
    return idle


Option = tuple[Replica, Lookup]


def option(name: str, shared_s: float | None, num_inflight: int = 0) -> Option:
    """A plan that takes so long; None: no plan."""
    if shared_s is None:
        return replica(name, num_inflight), Lookup(NoPlan(Reason.NO_CANDIDATES))
    plan = Plan(100, 0, (), (), (), 0, Estimate(10.0, shared_s))
    return replica(name, num_inflight), Lookup(plan)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ([option("a", None), option("b", 1.0)], "b"),
        ([option("a", 2.0), option("b", 1.0, 3)], "b"),
        ([option("a", 2.0), option("b", 1.0, 4)], "a"),
        ([option("a", None), option("b", 1.0, 4)], "a"),
        ([option("a", None, 2), option("b", None, 1)], "b"),
        ([option("a", 1.0, 2), option("b", 1.0, 1)], "b"),
        ([option("a", 1.0, 12), option("b", None, 11)], "a"),
        ([option("a", None, 50), option("b", None, 50)], "a"),
        ([option("a", None), (replica("b"), Lookup(NoPlan(Reason.NO_CONNECTOR)))], "a"),
    ],
)
def test_the_best_plan_wins_unless_its_replica_is_overloaded(options: list[Option], chosen: str) -> None:
    """Then the next best; without plans the idlest; where all are overloaded, as if none were."""
    assert choose(dict(options), SETTINGS).name == chosen


class TestPlans:
    """What a request is sent with."""

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"mode": SharingMode.OFF}, Reason.OFF),
            ({"may_store": False}, Reason.NO_CANDIDATES),
        ],
    )
    async def test_what_neither_copies_nor_stores_has_no_ticket(
        self, fleet: ServedFleet, vllm: FakeVllm, options: dict[str, object], reason: Reason
    ) -> None:
        request = await fleet.report("Rome", **options)
        assert request.routed.ticket is None
        assert request.routed.plan.reason is reason
        assert vllm.generated[0].body["cache_salt"] == owner_salt(OWNER)
        assert fleet.nodes == ()

    async def test_a_near_duplicate_is_sent_with_a_plan_under_a_salt_of_its_own(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        await fleet.report("Rome")
        request = await fleet.report("Oslo", may_store=False)
        ticket = vllm.tickets[-1]
        assert ticket.copies
        assert not ticket.store
        assert request.routed.ticket == ticket
        assert vllm.generated[-1].body["cache_salt"] == private_salt(ticket.ticket_id)
        assert request.progress.queue_s == 0.0
        assert {"fingerprint", "plan"} <= request.progress.lookup_seconds.keys()
        assert len(fleet.nodes) == 1

    async def test_equal_prefixes_only_is_equal_prefixes_only(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        await fleet.report("Rome")
        await fleet.report("Rome and Venice", mode=SharingMode.EXACT)
        await fleet.ask(FORM.format(place="Rome") + " And more of it.", mode=SharingMode.EXACT)
        _, edited, longer = vllm.tickets
        assert edited.copies == ()
        assert longer.is_exact
        assert longer.exact_length == len(FORM.format(place="Rome"))

    async def test_a_planning_that_fails_costs_the_plan_only(
        self,
        fleet: ServedFleet,
        vllm: FakeVllm,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The log has the error's class and place, not its message, which may quote a prompt."""

        async def fail(*_: object, **__: object) -> None:
            raise ValueError(FORM)

        with monkeypatch.context() as patch:
            patch.setattr(Sharing, "find_plan", fail)
            request = await fleet.report("Rome")
        assert request.routed.plan.reason is Reason.LOOKUP_FAILED
        assert request.progress.is_complete
        assert vllm.tickets == []
        assert fleet.counts.fallbacks[Component.PLANNING, FallbackReason.ERROR] == 1
        assert (
            "planning failed, the request is served unshared; please report this: ValueError" in caplog.text
        )
        assert FORM[:20] not in caplog.text

    async def test_a_request_without_a_prompt_is_only_relayed(self, fleet: ServedFleet) -> None:
        request = RoutedRequest(Incoming(OWNER, mode=SharingMode.APPROX))
        with fleet.engine.server.router.controlled(request):
            assert await fleet.engine.server.router.route(request) is fleet.replica
        assert (request.routed.ticket, request.routed.arrival) == (None, None)

    async def test_where_none_shares_the_reason_says_why(self) -> None:
        """And without a vLLM there is an error."""
        async with (
            running_vllm(Behaviour(passing="drafts", speculation="eagle3")) as vllm,
            serving(None, vllm, wait=False) as fleet,
        ):
            await eventually(lambda: fleet.replica.serves and fleet.replica.is_connected)
            request = await fleet.report("Rome")
            assert request.routed.plan.reason is Reason.SPECULATION
            assert vllm.tickets == []
            await vllm.stop()
            await eventually(lambda: not fleet.replica.serves)
            with pytest.raises(NoReplicaError):
                await fleet.report("Rome")

    async def test_asking_for_a_plan_changes_nothing(self, fleet: ServedFleet, vllm: FakeVllm) -> None:
        """As `kvshare explain` does."""
        await fleet.report("Rome")
        (before,) = fleet.nodes
        tokens = token_ids(list(FORM.format(place="Oslo").encode()))
        incoming = Incoming(OWNER, Prompt(tokens, PromptText("", "")), SharingMode.APPROX)
        route = await fleet.engine.server.router.find(incoming)
        assert route.replica is fleet.replica
        assert isinstance(route.lookup.plan, Plan)
        assert fleet.nodes == (before,)
        assert len(vllm.generated) == 1
        assert (len(fleet.engine.server.in_flight), fleet.replica.num_inflight) == (0, 0)


class TestReplicas:
    """Where a request goes, and where it goes then."""

    async def test_a_request_goes_where_its_donor_is(self, tmp_path: Path) -> None:
        """KV cannot move: of two replicas the one that has it computes, whichever is idler."""
        async with running_vllm() as one, running_vllm() as two, serving(tmp_path, one, two) as fleet:
            await fleet.report("Rome")
            await fleet.ask(OTHER)
            assert len(one.generated) == len(two.generated) == 1
            for place in ("Oslo", "Bonn", "Bern", "Nice"):
                await fleet.report(place)
            rome = one if "Rome" in str(one.generated[0].body) else two
            assert len(rome.generated) == 5
            assert all(ticket.copies for ticket in rome.tickets[1:])
            assert one.tickets[0].namespace != two.tickets[0].namespace

    async def test_an_overloaded_replicas_donors_are_passed_over(self, tmp_path: Path) -> None:
        """It has so many requests more than the other one that waiting would cost more than computing."""
        async with (
            running_vllm() as one,
            running_vllm() as two,
            serving(tmp_path, one, two, vllm__max_imbalance=2) as fleet,
        ):
            await fleet.report("Rome")
            home, other = (one, two) if one.generated else (two, one)
            fleet.replica_of(home).num_inflight += 2
            await fleet.report("Bonn")
            assert len(other.generated) == 1
            assert other.tickets[0].copies == ()

    async def test_a_replica_that_is_gone_is_replaced(self, tmp_path: Path) -> None:
        """The request had a plan for it; the other one computes it whole, and stores nothing of the plan."""
        async with (
            running_vllm() as one,
            running_vllm() as two,
            serving(tmp_path, one, two, vllm__health_interval_s=60.0) as fleet,
        ):
            await fleet.report("Rome")
            home, other = (one, two) if one.generated else (two, one)
            await home.stop_api()  # its connector still answers: the plan is for it
            gone = fleet.replica_of(home)
            request = await fleet.send(FORM.format(place="Oslo"))
            assert request.progress.is_complete
            assert request.routed.plan.reason is Reason.REPLICA_GONE
            assert request.routed.ticket is None
            assert request.replica == fleet.replica_of(other).name
            assert (gone.models, gone.num_inflight, gone.requests) == (None, 0, set())
            for _ in range(2):  # the failed one is not tried again
                await fleet.report("Bern")
            assert len(other.generated) == 3
            assert fleet.counts.replica_failures == {gone.name: 1}
            assert len(fleet.engine.server.in_flight.arrivals) == 0

    async def test_where_all_are_gone_each_is_tried_once(self, tmp_path: Path) -> None:
        async with (
            running_vllm() as one,
            running_vllm() as two,
            serving(tmp_path, one, two, vllm__health_interval_s=60.0) as fleet,
        ):
            await asyncio.gather(one.stop(), two.stop())
            with pytest.raises(NoReplicaError):
                await fleet.send(FORM)
            assert sorted(fleet.counts.replica_failures.values()) == [1, 1]
            assert len(fleet.engine.server.in_flight) == 0
            assert len(fleet.engine.server.in_flight.arrivals) == 0
            assert fleet.engine.status().num_running == 0

    async def test_a_client_that_leaves_is_counted_out(self, fleet: ServedFleet, vllm: FakeVllm) -> None:
        """Whenever it does. Its ticket waits for a report, as vLLM may have stored its prompt."""
        vllm.release.clear()
        asking = asyncio.create_task(fleet.send(FORM))
        await eventually(lambda: len(vllm.generated) == 1)
        assert fleet.replica.num_inflight == len(fleet.replica.requests) == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (fleet.replica.num_inflight, len(fleet.replica.requests)) == (0, 0)
        vllm.release.set()


class TestControl:
    """What the controller takes from the router's plans."""

    async def test_a_block_without_sharing_is_sent_as_stock_vllm_gets_it(
        self, vllm: FakeVllm, tmp_path: Path
    ) -> None:
        """Neither a copy nor a save."""
        shares: dict[str, Any] = {"control__unshared_share": 1.0, "control__first_requests": 0}
        async with serving(tmp_path, vllm, **shares) as fleet:
            for place in ("Rome", "Oslo"):
                assert (await fleet.report(place)).routed.plan.reason is Reason.EXPERIMENT
            assert (await fleet.report("Rome", mode=SharingMode.OFF)).routed.plan.reason is Reason.OFF
            control = fleet.engine.status().control
            assert control is not None
            assert control.num_requests[Arm.UNSHARED] == 2  # without the one that shares nothing anyway
            assert vllm.tickets == []
            assert fleet.nodes == ()

    async def test_with_drafts_an_experiment_is_reported(self, tmp_path: Path) -> None:
        """By a ticket that copies and stores nothing: or there would be nothing to compare with."""
        shares: dict[str, Any] = {"control__unshared_share": 1.0, "control__first_requests": 0}
        async with (
            running_vllm(Behaviour(speculation="ngram", caches_prefixes=True)) as vllm,
            serving(tmp_path, vllm, **shares) as fleet,
        ):
            request = await fleet.report("Rome")
            assert request.is_only_compared
            assert [(each.copies, each.store) for each in vllm.tickets] == [((), False)]
            assert vllm.generated[0].body["cache_salt"] == owner_salt(OWNER)
            assert fleet.counts.executions.total() == 0  # a prefix in vLLM's cache makes it no shared one

    async def test_a_rung_on_which_only_what_resembles_an_earlier_prompt_is_stored(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        """The first of a family has no ticket, the second is stored, the third copies."""
        put_on(fleet.engine.server.runtime.control, Rung.WANTED_SAVES)
        for text in (*(FORM.format(place=place) for place in ("Rome", "Oslo", "Bern")), OTHER):
            await fleet.ask(text)
        stored, copied = vllm.tickets
        assert (stored.copies, stored.store) == ((), True)
        assert copied.copies

    async def test_a_rung_on_which_nothing_is_shared(self, fleet: ServedFleet, vllm: FakeVllm) -> None:
        """What is stored is not looked up there, and nothing is added."""
        await fleet.report("Rome")
        put_on(fleet.engine.server.runtime.control, Rung.NOTHING)
        assert (await fleet.report("Oslo")).routed.plan.reason is Reason.REDUCED
        assert (len(vllm.tickets), len(fleet.nodes)) == (1, 1)
