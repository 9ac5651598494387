"""A prefill that chooses its repairs: the same choice and the same KV as the fidelity lab's rule."""

import numpy as np
import pytest
import torch

from delta_tree import Copy, NodeId, SegmentId, Span, TokenIds, gaps, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.prefill import Prefill
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SegmentKV, SequenceKV
from kvshare.sharing.plan import Plan, RepairOrder, without
from kvshare.sharing.rates import Estimate
from kvshare.sharing.repair_choice import probes, spans_where
from kvshare_lab.bench.random_models import tiny_model
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.base import num_wanted, pieces
from kvshare_lab.fidelity.trial import Selection, Trial
from lab.tests.fidelity.scenes import CLOSE, SCENES, trial

scenes = pytest.mark.parametrize("scene", sorted(SCENES))
BUDGET = 0.15


def plan_of(made: Trial, *, budget: float = BUDGET) -> Plan:
    """A trial's plan as the server has it, with an order for its budget."""
    computed = tuple(spans_where(made.base))
    order = RepairOrder(
        stretches=tuple(pieces(made)),
        probes=tuple(probes(pieces(made), made.num_tokens).tolist()),
        num_tokens=num_wanted(made, budget),
    )
    return Plan(
        num_tokens=made.num_tokens,
        exact_length=made.exact_length,
        copies=without(made.copies, computed),
        placeholders=computed,
        repairs=(),
        generation=1,
        estimate=Estimate(1.0, 0.5),
        order=order,
    )


def computed(made: Trial, plan: Plan, *, max_queries: int = 512) -> tuple[Prefill, SequenceKV, torch.Tensor]:
    kv = made.model.model.new_sequence(made.num_tokens)
    kv.k.zero_()
    kv.v.zero_()
    kv.write_copies(plan.copies, made.stored.kv)
    prefill = Prefill(made.model.model.compute, made.scenario.prompt.token_ids, plan, kv)
    logits = None
    while logits is None:
        _, logits = prefill.advance(max_queries=max_queries)
    return prefill, kv, torch.log_softmax(logits, dim=-1)


def chosen(prefill: Prefill) -> list[int]:
    assert isinstance(prefill.plan, Plan)
    return [place for span in prefill.plan.repairs for place in range(span.start, span.end)]


@scenes
@pytest.mark.parametrize("max_queries", [512, 7])
def test_it_chooses_and_computes_what_the_lab_does(scene: str, max_queries: int) -> None:
    """The same positions, the same KV in every slot, the same first token; in one pass or in many."""
    made = trial(scene)
    selection = RULES["kvshare"].choose(made, BUDGET)
    expected = made.run(selection)
    prefill, kv, logits = computed(made, plan_of(made), max_queries=max_queries)
    assert chosen(prefill) == selection.rows.nonzero()[0].tolist()
    for found, wanted in ((kv.k, expected.kv.k), (kv.v, expected.kv.v)):
        torch.testing.assert_close(found, wanted[:, : made.num_tokens], atol=CLOSE, rtol=0)
    torch.testing.assert_close(logits, expected.log_probabilities[0], atol=1e-4, rtol=0)


@scenes
def test_the_plan_says_how_much_is_computed(scene: str) -> None:
    """Before and after the choice, and as many tokens as went through the model."""
    made = trial(scene)
    plan = plan_of(made)
    kv = made.model.model.new_sequence(made.num_tokens)
    kv.write_copies(plan.copies, made.stored.kv)
    prefill, num_computed, logits = (
        Prefill(made.model.model.compute, made.scenario.prompt.token_ids, plan, kv),
        0,
        None,
    )
    while logits is None:
        count, logits = prefill.advance(max_queries=512)
        num_computed += count
    assert num_computed == plan.num_computed + plan.num_selecting
    assert isinstance(prefill.plan, Plan)
    assert prefill.plan.num_computed == plan.num_computed
    assert prefill.plan.num_repaired == plan.num_repaired == num_wanted(made, BUDGET)
    assert prefill.plan.num_copied == plan.num_copied


def test_it_beats_no_repair() -> None:
    """On what moved, a choice of a third of the tokens comes nearer to the full prefill than none."""
    made = trial("moved")
    _, _, logits = computed(made, plan_of(made, budget=0.33))
    nothing = made.run(Selection(np.zeros(made.num_tokens, np.bool_))).log_probabilities[0]
    truth = made.truth[0]

    def kl(other: torch.Tensor) -> float:
        return float((truth.exp() * (truth - other)).sum())

    assert kl(logits) < kl(nothing)


def test_what_was_attended_to_before_it_was_repaired_leaves_nothing_exact() -> None:
    """The whole first piece is repaired; what the probe pass computed behind it saw the copy all the same."""
    made = trial("edited")
    plan = plan_of(made)
    first = next(copy for copy in plan.copies if copy.target_start >= plan.exact_length)
    repaired = plan.with_repairs([first.target])
    assert all(copy.target_start != first.target_start for copy in repaired.copies)
    assert repaired.first_approximate == plan.first_approximate == first.target_start
    assert repaired.repairs == (first.target,)
    assert repaired.order is None
    assert repaired.num_copied == plan.num_copied + num_wanted(made, BUDGET) - first.length


def test_listeners_are_the_last_computed_tokens() -> None:
    made = trial("edited")
    plan = plan_of(made)
    places = [place for span in plan.listeners for place in range(span.start, span.end)]
    assert places == made.base.nonzero()[0][-32:].tolist()
    assert Span(0, 0) not in plan.listeners


def edited_in_three_places(
    model: EmbeddedModel, *, num_repaired: int
) -> tuple[TokenIds, Plan, dict[SegmentId, SegmentKV]]:
    """A prompt of 400 tokens, its plan over a stored one that differs in three tokens, and that one's KV."""
    rng = np.random.default_rng(0)
    stored = token_ids(rng.integers(16, 290, 400))
    asked = np.array(stored)
    asked[[200, 201, 300]] = [3, 4, 5]
    source = model.new_sequence(400)
    model.compute(PartialPass(source, (Span(0, 400),)), stored)
    segments = {SegmentId(1): source.cut(Span(0, 400))}
    placeholders = (Span(200, 202), Span(300, 301), Span(384, 400))
    copies = tuple(
        Copy(NodeId(1), SegmentId(1), span.start, len(span), span.start, span.start, span.start)
        for span in gaps(placeholders, 400)
    )
    copied_behind = tuple(copy.target for copy in copies if copy.target_start >= 200)
    order = RepairOrder(copied_behind, tuple(probes(copied_behind, 400).tolist()), num_repaired)
    plan = Plan(
        num_tokens=400,
        exact_length=200,
        copies=copies,
        placeholders=placeholders,
        repairs=(),
        generation=1,
        estimate=Estimate(1.0, 0.5),
        order=order if num_repaired else None,
    )
    return token_ids(asked), plan, segments


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "llama4", "mistral-window"])
@pytest.mark.parametrize("repaired", [0, 40])
@pytest.mark.parametrize("poison", [1e4, float("nan")])
def test_what_nobody_may_see_is_not_written_and_not_missed(family: str, repaired: int, poison: float) -> None:
    """With repairs still to be chosen anywhere; all that is not written holds poison."""
    model = EmbeddedModel(tiny_model(family), name=family)
    asked, plan, segments = edited_in_three_places(model, num_repaired=repaired)
    found = []
    for may_compute in (None, plan.may_compute):
        kv = model.new_sequence(400)
        for plane in kv.planes:
            plane.fill_(poison)
        num_bytes = kv.write_copies(plan.copies, segments, computed=may_compute)
        prefill, logits = Prefill(model.compute, asked, plan, kv), None
        while logits is None:
            _, logits = prefill.advance(max_queries=64)
        found.append((logits, prefill.plan, num_bytes))
    (all_logits, all_plan, all_bytes), (logits, carried_out, num_bytes) = found
    assert torch.equal(logits, all_logits)
    assert carried_out == all_plan
    assert num_bytes < 0.8 * all_bytes
    assert not kv.is_whole
