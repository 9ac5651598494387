"""What requests reused, saved and cost, by minute, tenant and decision."""

from __future__ import annotations

import pytest

from kvshare.engine import Finished
from kvshare.namespace import Owner
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prediction, SharingMode, SharingReport
from proxy.activity import MOST_MINUTES, Activity
from proxy.auth import Caller
from proxy.request_record import RequestFailure, RequestRecord
from tests.proxy.conftest import Server, chat

NOON = 1_800_000_000.0  # a whole minute
REPORT = SharingReport(60, 20, 15, 5, Decision.APPROX, saved_s=2.0)
REFUSED = SharingReport(
    *(0, 0, 100, 0),
    Decision.FULL,
    Reason.DEVIATES_TOO_MUCH,
    prediction=Prediction(0.2, 0.3, 0.0, 0.05, "windows", 0),
)


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def served(*reports: SharingReport, tenant: str = "acme", lookup_s: float = 0.25) -> RequestRecord:
    """A request that is over."""
    record = RequestRecord("client's", "ours")
    record.admission.caller = Caller("alice", Owner(tenant, "tenant"))
    record.preparation.mode = SharingMode.APPROX
    record.answer.reports = dict(enumerate(reports))
    stages = {"prefix": lookup_s, "recompute": 9.0}
    record.answer.finished = {0: Finished(reports[0], 1, stages)} if reports else {}
    return record


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def activity(clock: Clock) -> Activity:
    return Activity(clock)


def test_tokens_and_seconds_are_added(activity: Activity) -> None:
    """Of the stages only those of the lookup are spent on sharing."""
    for _ in range(2):
        activity.count(served(REPORT), 200)
    assert activity.document(60)["total"] == {
        "requests": 2,
        "failed": 0,
        "exact": 120,
        "copied": 40,
        "repaired": 10,
        "recomputed": 30,
        "saved_s": 4.0,
        "spent_s": 0.5,
    }


def test_a_bin_has_what_happened_in_its_time(activity: Activity, clock: Clock) -> None:
    """The last bin is now; of six hours each is six minutes long, and none is empty."""
    activity.count(served(REPORT), 200)
    clock.now += 7 * 60
    activity.count(served(REPORT, REPORT), 200)
    hour = activity.document(60)
    assert [(each["bin"], each["exact"]) for each in hour["bins"]] == [(52, 60), (59, 120)]
    assert hour["start"] + 59 * hour["step_s"] == NOON + 7 * 60
    longer = activity.document(360)
    assert (longer["num_bins"], longer["step_s"]) == (60, 360)
    assert [each["exact"] for each in longer["bins"]] == [60, 120]


def test_what_is_too_long_ago_is_left_out(activity: Activity, clock: Clock) -> None:
    """And after a day it is forgotten."""
    activity.count(served(REPORT), 200)
    clock.now += 60 * 60
    assert activity.document(60)["total"]["requests"] == 0
    assert activity.document(61)["total"]["requests"] == 1
    for _ in range(MOST_MINUTES):
        clock.now += 60
        activity.count(served(), 200)
    assert activity.document(MOST_MINUTES)["total"]["exact"] == 0


def test_tenants_are_named_and_private_keys_are_their_tenant(activity: Activity) -> None:
    """The one that reused most comes first."""
    private = served(REFUSED)
    private.admission.caller = Caller("dave", Owner('["globex", "dave"]', "private"))
    for record in (private, served(REPORT)):
        activity.count(record, 200)
    document = activity.document(60)
    assert [(each["tenant"], each["recomputed"]) for each in document["tenants"]] == [
        ("acme", 15),
        ("globex", 100),
    ]


def test_the_keys_of_a_tenant_are_told_apart(activity: Activity) -> None:
    """As of one tenant several applications may have keys; together they are the tenant's."""
    other = served(REPORT)
    other.admission.caller = Caller("mail", Owner("acme", "tenant"))
    for record in (served(REPORT), other, served(REPORT)):
        activity.count(record, 200)
    document = activity.document(60)
    keys = [(each["tenant"], each["key"], each["exact"]) for each in document["keys"]]
    assert keys == [("acme", "alice", 120), ("acme", "mail", 60)]
    assert (document["num_tenants"], document["num_keys"]) == (1, 2)
    assert document["tenants"][0]["exact"] == 180


def test_decisions_say_what_was_refused_and_how_far_it_would_have_deviated(activity: Activity) -> None:
    for report in (REPORT, REFUSED, REFUSED):
        activity.count(served(report), 200)
    refused, shared = activity.document(60)["decisions"]
    assert (refused["decision"], refused["reason"]) == ("full", "deviates_too_much")
    assert (refused["prompts"], refused["computed"], refused["expected"]) == (2, 200, pytest.approx(0.2))
    assert (refused["bound"], refused["limit"]) == (0.3, 0.05)
    assert (shared["decision"], shared["reason"], shared["expected"]) == ("approx", None, None)


def test_failures_are_counted_and_other_routes_are_not(activity: Activity) -> None:
    """A stream that broke off has failed, too; a refusal by the client's fault has not."""
    broken = served(REPORT)
    broken.answer.broken_off = RequestFailure("engine_error", "it broke")
    other = served()
    other.preparation.mode = None
    for record, status in ((broken, 200), (served(), 500), (served(), 400), (other, 500)):
        activity.count(record, status)
    total = activity.document(60)["total"]
    assert (total["requests"], total["failed"]) == (3, 2)


async def test_the_route_answers_for_requests_that_were_served(server: Server) -> None:
    """Its argument is checked."""
    for _ in range(2):
        await server.post("/v1/chat/completions", chat())
    document = await (await server.get("/admin/activity?minutes=5")).json()
    total = document["total"]
    assert total["requests"] == 2
    assert [each["tenant"] for each in document["tenants"]] == ["local"]
    assert sum(total[kind] for kind in ("exact", "copied", "repaired", "recomputed")) == 22
    for wrong in ("minutes=0", "minutes=1441", "minutes=x", "hours=1"):
        assert (await server.get(f"/admin/activity?{wrong}")).status == 400


async def test_the_status_names_model_limits_and_reasons(server: Server) -> None:
    document = await (await server.get("/admin/status")).json()
    assert (document["model"], document["engine"], document["ready"]) == ("echo", "embedded", True)
    assert document["limits"]["mode"] == "approx"
    assert document["reasons"].keys() == set(Reason)
