"""Where a request goes."""

from __future__ import annotations

import pytest

from kvshare.fleet.replica import Replica
from kvshare.fleet.router import choose
from kvshare.reasons import Reason
from kvshare.settings import load_settings
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Estimate

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
