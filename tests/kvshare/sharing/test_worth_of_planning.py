"""Whether planning is worth its time for prompts that share little with stored ones."""

from kvshare.reasons import Reason
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan
from kvshare.sharing.worth import Worth
from tests.kvshare.sharing.test_worth import LIMITS, learned
from vector_index import Candidate, Nomination


def test_prompts_that_share_little_are_planned_where_that_takes_little() -> None:
    """Of 10,000 tokens planning may take 4 % at first; 2 % once such plans were refused, but for a few."""
    near, far = ((Candidate(1, ("fingerprint",), score),) for score in (0.9, 0.3))
    for planning_s, expected in ((0.005, 100), (0.012, 1), (0.05, 0)):
        cost = learned()
        worth = Worth(cost)
        for _ in range(9):
            cost.observe_lookup(10_000, 0.001, planning_s=planning_s)
        for _ in range(9):
            worth.learn(
                Lookup(
                    NoPlan(Reason.DOES_NOT_PAY),
                    candidates=far,
                    stage_seconds={"fingerprint": 0.001, "plan": planning_s},
                    num_tokens=10_000,
                    seconds=0.001 + planning_s,
                )
            )
        made = [worth.planning(10_000, Nomination(far, 0, {}, ()), LIMITS) for _ in range(100)]
        assert sum(made) <= max(1, expected)
        assert expected < 100 or all(made)
        assert worth.planning(10_000, Nomination(near, 0, {}, ()), LIMITS)
