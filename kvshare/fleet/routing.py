"""Where a request goes: to its donors' KV, unless that replica is overloaded; else to the idlest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshare.fleet.replica import Replica
from kvshare.sharing.pipeline import Lookup
from kvshare.sharing.plan import Plan


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """When a replica is overloaded: it has so many requests, or so many more than the idlest one."""

    max_inflight: int
    max_imbalance: int


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A replica, and what sharing found there; None where nothing was looked up."""

    replica: Replica
    lookup: Lookup | None = None
    namespace: str = ""  # where it was looked up

    @property
    def seconds(self) -> float:
        """What the prefill should take with the plan found; without one, more than with any."""
        plan = self.lookup.plan if self.lookup is not None else None
        return plan.estimate.shared_s if isinstance(plan, Plan) else float("inf")


def choose(options: Sequence[Option], limits: LoadLimits) -> Option:
    """The best of at least one option. Load decides between equals, then the order of `options`."""
    allowed = without_overloaded([option.replica for option in options], limits)
    return min(
        (option for option in options if option.replica in allowed),
        key=lambda option: (option.seconds, option.replica.num_inflight),
    )


def without_overloaded(replicas: Sequence[Replica], limits: LoadLimits) -> list[Replica]:
    """The replicas that may be given more; all of them where all are overloaded."""
    idlest = min(replica.num_inflight for replica in replicas)
    allowed = [
        replica
        for replica in replicas
        if replica.num_inflight < limits.max_inflight and replica.num_inflight - idlest < limits.max_imbalance
    ]
    return allowed or list(replicas)
