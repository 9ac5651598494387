"""What `kvshare explain` says of the candidates: what the plan took, not what a composition would have."""

from dataclasses import replace
from typing import Any

import pytest

from delta_tree import DeltaTree, Span, TokenIds
from kvshare.kv.tier import EverySegment
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.explain import explain_lookup
from kvshare.sharing.keeper import PromptKeeper
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan, clip
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
    (shown,) = explained(tree, limits, Lookup(plan, candidates=(candidate,), namespace="ns"), tokens)[
        "donors"
    ]
    assert shown["outcome"] == outcome
    assert bool(shown["tokens_used"]) == (outcome == "used")


def test_copies_that_follow_each_other_are_one_span() -> None:
    """A donor has its KV in many segments; whoever asks why a prompt was shared does not ask for these."""
    tree, tokens = DeltaTree.open(None, identity="test"), prompt(400)
    limits = PlannerLimits.from_settings(load_settings())
    donor = stored(tree, tokens)
    plan = make_plan(tokens, [donor], tree.segment, approximate=True, limits=limits, rates=RATES)
    assert isinstance(plan, Plan)
    halves = [Span(0, 200), Span(200, 400)]
    copies = tuple(part for copy in plan.copies for half in halves if (part := clip(copy, half)) is not None)
    spans = explained(tree, limits, Lookup(replace(plan, copies=copies)), tokens)["spans"]
    assert len(copies) == 2
    assert [(span["start"], span["end"], span["kind"]) for span in spans] == [
        (0, 399, "exact"),
        (399, 400, "repair"),
    ]


def explained(tree: DeltaTree, limits: PlannerLimits, lookup: Lookup, tokens: TokenIds) -> dict[str, Any]:
    sharing = Sharing(
        keeper=PromptKeeper(tree, EverySegment(), min_tokens=1),
        nominator=Nominator(QdrantRemoteIndex(NominatorSettings().schema(None), ":memory:")),
        limits=limits,
        cost=CostModel(RATES),
    )
    request = Prompt(tokens, PromptText(last_user_turn="", body=""))
    return explain_lookup(sharing, request, lookup, SharingMode.APPROX)
