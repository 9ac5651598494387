"""What `kvshare explain` says of the candidates: what the plan took, not what a composition would have."""

import pytest

from delta_tree import DeltaTree
from kvshare.kv.tier import EverySegment
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.explain import explain_lookup
from kvshare.sharing.keeper import PromptKeeper
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from tests.kvshare.sharing.prompts import RATES, prompt, replaced, stored
from vector_index import Candidate, Nominator, NominatorSettings, PromptText, QdrantRemoteIndex


@pytest.mark.parametrize(("max_deviation", "outcome"), [(1.0, "used"), (0.0, "left_out")])
def test_a_donor_that_the_plan_does_without_is_left_out(max_deviation: float, outcome: str) -> None:
    """A composition took it; the limit on deviation refused what came of it."""
    tree, tokens = DeltaTree.open(None, identity="test"), prompt(400)
    donor = stored(tree, replaced(tokens, (0, 8)))
    settings = load_settings()
    limited = settings.sharing.model_copy(update={"max_deviation": max_deviation})
    limits = PlannerLimits(sharing=limited, repair=settings.repair)
    plan = make_plan(tokens, [donor], tree.segment, approximate=True, limits=limits, rates=RATES)
    assert isinstance(plan, Plan if outcome == "used" else NoPlan)
    candidate = Candidate(int(donor.node_id), ("fingerprint",), 0.9)
    lookup = Lookup(plan, candidates=(candidate,), namespace="ns")
    sharing = Sharing(
        keeper=PromptKeeper(tree, EverySegment(), min_tokens=1),
        nominator=Nominator(QdrantRemoteIndex(NominatorSettings().schema(None), ":memory:")),
        limits=limits,
        cost=CostModel(RATES),
    )
    request = Prompt(tokens, PromptText(last_user_turn="", body=""))
    (shown,) = explain_lookup(sharing, request, lookup, SharingMode.APPROX)["donors"]
    assert shown["outcome"] == outcome
    assert bool(shown["tokens_used"]) == (outcome == "used")
