"""What is worth its time where rates are not measured yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_tree import Copy, NodeId, SegmentId, Span
from kvshare.reasons import Reason
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import (
    BLOCKS,
    MEMORY,
    Estimate,
    LoadRate,
    MinSaved,
    PrefillWork,
    Queue,
    Rates,
)
from kvshare.sharing.worth import Search, Worth
from tests.kvshare.sharing.test_cost import BYTES, TRUE
from vector_index import Candidate, Nomination
from vector_index.nomination import Source

LIMITS = PlannerLimits.from_settings(load_settings())


@pytest.mark.parametrize("num_tokens", [4096, 16384])
def test_prompts_are_looked_up_until_a_load_is_measured(num_tokens: int) -> None:
    """A prior that takes loads for slower than computing would never be corrected by requests it refuses."""
    slow = replace(TRUE, loads={MEMORY: LoadRate(0.001, 1 / 0.5e9)}, lookup=LoadRate(0.001, 1e-7))
    cost = CostModel(slow)
    worth = Worth(cost)
    for _ in range(3):
        cost.observe_lookup(num_tokens, 0.002)
        cost.observe_prefill(num_tokens, TRUE.full_s(num_tokens))
    assert all(worth.search(num_tokens, LIMITS) is Search.PASSAGES for _ in range(100))
    cost.observe_load(num_tokens * BYTES, num_tokens * BYTES / 0.5e9)
    assert sum(worth.search(num_tokens, LIMITS) is not Search.NOTHING for _ in range(100)) <= 1


def test_prompts_for_which_no_load_is_quick_enough_are_not_looked_up() -> None:
    """Whose full prefill takes no longer than what a plan must save."""
    cost = CostModel(replace(TRUE, step_s=0.001))
    worth = Worth(cost)
    for _ in range(3):
        cost.observe_lookup(64, 0.002)
        cost.observe_prefill(64, 0.003)
    assert sum(worth.search(64, LIMITS) is not Search.NOTHING for _ in range(100)) <= 1


def test_no_prompt_is_embedded_before_both_times_are_measured() -> None:
    """By priors of a slow machine the first prompts would wait for an embedding that saves them nothing."""
    cost = CostModel(replace(TRUE, token_s=0.001))
    worth = Worth(cost)
    assert not any(worth.embedding(8192, LIMITS) for _ in range(10))
    cost.observe_embedding(8192, 0.01)
    assert not any(worth.embedding(8192, LIMITS) for _ in range(10))
    cost.observe_prefill(8192, 2.0)
    assert worth.embedding(8192, LIMITS)
    cost.observe_prefill(8192, 0.08)
    for _ in range(20):
        cost.observe_prefill(8192, 0.08)
    assert not any(worth.embedding(8192, LIMITS) for _ in range(200))


def learned() -> CostModel:
    """On a device like TRUE, where everything was measured."""
    cost = CostModel(replace(TRUE, lookup=LoadRate(0.0004, 1e-7)))
    for num_tokens in (512, 2048, 8192):
        cost.observe_prefill(num_tokens, TRUE.full_s(num_tokens))
        work = PrefillWork(
            num_tokens // 10, num_tokens**2 / 20, num_passes=1, num_reused=num_tokens * 9 // 10
        )
        cost.observe(work, TRUE.seconds(work))
        cost.observe_load(num_tokens * BYTES, TRUE.load_s(num_tokens))
    return cost


@pytest.mark.parametrize(("num_tokens", "expected"), [(900, False), (2048, True)])
def test_passages_are_searched_where_a_pass_would_pay(num_tokens: int, expected: bool) -> None:
    """A shorter prompt is looked up for its prefix only, which needs no pass."""
    worth = Worth(learned())
    assert worth.lookup(num_tokens, LIMITS)
    assert worth.passages(num_tokens, LIMITS) is expected


def test_passages_are_searched_until_a_pass_is_measured() -> None:
    """However long one takes by its prior."""
    assert Worth(CostModel(replace(TRUE, pass_s=1.0))).passages(2048, LIMITS)


@pytest.mark.parametrize(
    ("num_tokens", "score", "num_prefix_tokens", "expected"),
    [
        (4096, 0.1, 0, False),
        (4096, 0.9, 0, True),
        (16384, 0.3, 0, True),
        (4096, 0.5, 2048, True),  # without a pass
        (4096, 0.0, 0, True),  # found by its meaning: nobody knows what it shares
    ],
)
def test_a_plan_is_made_where_its_donors_have_enough(
    num_tokens: int, score: float, num_prefix_tokens: int, expected: bool
) -> None:
    """By the share of the prompt that the search for them estimates."""
    candidate = Candidate(1, ("fingerprint",) if score else ("embedding",), score)
    nomination = Nomination((candidate,), num_prefix_tokens, {}, ())
    assert Worth(learned()).planning(num_tokens, nomination, LIMITS) is expected


@pytest.mark.parametrize(
    ("score", "num_prefix_tokens", "reason"),
    [
        (0.008, 24, Reason.NO_CANDIDATES),  # the template of chats, and some words that many prompts have
        (0.3, 24, Reason.DOES_NOT_PAY),
        (0.008, 500, Reason.DOES_NOT_PAY),
    ],
)
def test_candidates_that_are_not_similar_count_as_none(
    score: float, num_prefix_tokens: int, reason: Reason
) -> None:
    """An operator who reads that a prompt does not pay would look for another one that is like it."""
    candidate = Candidate(1, ("fingerprint",), score)
    nomination = Nomination((candidate,), num_prefix_tokens, {}, ())
    assert Worth.unplanned(nomination, min_run=32) is reason


def test_no_candidates_at_all() -> None:
    assert Worth.unplanned(Nomination((), 0, {}, ()), min_run=32) is Reason.NO_CANDIDATES


@pytest.mark.parametrize(
    ("num_tokens", "score", "planning_s", "expected"),
    [
        (10_000, 0.1, 0.0001, True),  # it may be a fifth
        (10_000, 0.1, 0.02, False),
        (16_384, 0.9, 0.02, True),
        (256, 1.0, 0.0001, False),  # a donor that has all of a prompt that is too short for a pass
    ],
)
def test_planning_must_pay_too(num_tokens: int, score: float, planning_s: float, expected: bool) -> None:
    """Of donors that have little most plans are refused."""
    cost = learned()
    for _ in range(3):
        cost.observe_lookup(num_tokens, 0.001, planning_s=planning_s)
    nomination = Nomination((Candidate(1, ("fingerprint",), score),), 0, {}, ())
    assert Worth(cost).planning(num_tokens, nomination, LIMITS) is expected


def lookup_of(num_tokens: int, *, finds: bool, embedding_s: float | None = None) -> Lookup:
    """One that took 10 ms, whose plan copies from the donor that was found last; or it found none."""
    stages = {"fingerprint": 0.01} | ({} if embedding_s is None else {"embedding": embedding_s})
    source: Source = "fingerprint" if embedding_s is None else "embedding"
    found = Lookup(
        NoPlan(Reason.NO_CANDIDATES),
        stage_seconds=stages,
        namespace="ns",
        num_tokens=num_tokens,
        seconds=0.01 + (embedding_s or 0.0),
    )
    if not finds:
        return found
    copies = (Copy(NodeId(1), SegmentId(1), 0, num_tokens - 1, 0, 0, 0),)
    plan = Plan(
        num_tokens, 0, copies, (Span(num_tokens - 1, num_tokens),), (), generation=1, estimate=Estimate(1, 0)
    )
    return replace(found, plan=plan, candidates=(Candidate(1, (source,), 0.0),))


@pytest.mark.parametrize(("finds", "least", "most"), [(True, 900, 1100), (False, 10, 10)])
def test_embeddings_that_find_nothing_are_seldom_made(finds: bool, least: int, most: int) -> None:
    """A prompt like no other waits for 2 % of its own prefill at most; one in many is tried all the same."""
    cost = learned()  # in which 8,192 tokens take 217 ms
    cost.observe_embedding(8192, 0.012)
    worth, num_embedded = Worth(cost), 0
    for _ in range(1280):
        if worth.embedding(8192, LIMITS):
            num_embedded += 1
            worth.learn(lookup_of(8192, finds=finds, embedding_s=0.012))
    assert least <= num_embedded <= most


def test_rates_that_are_not_learned_refuse_no_search_for_what_it_found() -> None:
    """All requests of a replay are served by the same rules."""
    cost = CostModel(replace(TRUE, lookup=LoadRate(0.01, 0.0), embedding=LoadRate(0.012, 0.0)), learns=False)
    worth = Worth(cost)
    for _ in range(10):
        assert worth.search(8192, LIMITS) is Search.PASSAGES
        assert worth.embedding(8192, LIMITS)
        worth.learn(lookup_of(8192, finds=False, embedding_s=0.012))


@pytest.mark.parametrize(("finds", "least", "most"), [(True, 400, 400), (False, 4, 8)])
def test_lookups_that_find_nothing_are_seldom_made(finds: bool, least: int, most: int) -> None:
    """Where they take more than 2 % of a prefill, as with a tiny model. A prefix is always looked up."""
    cost = learned()  # in which 8,192 tokens take 217 ms, and a lookup 10
    worth, num_made = Worth(cost), 0
    for _ in range(400):
        search = worth.search(8192, LIMITS)
        assert search is not Search.NOTHING
        if search is Search.PASSAGES:
            num_made += 1
            worth.learn(lookup_of(8192, finds=finds))
    assert least <= num_made <= most


def test_a_search_for_a_prefix_says_nothing_of_lookups() -> None:
    """It takes microseconds: learned as what a lookup takes, it would let through those that take long."""
    cost = learned()
    worth, before = Worth(cost), cost.rates.lookup
    found = lookup_of(8192, finds=True)
    for _ in range(50):
        worth.learn(replace(found, stage_seconds={"prefix": 1e-5}, seconds=1e-4))
    assert cost.rates.lookup == before


def test_no_search_takes_too_long_where_plans_may_lose_time() -> None:
    """As with `cost.min_saved_s` below 0, for tests and demonstrations."""
    limits, cost = replace(LIMITS, threshold=MinSaved(-1.0)), learned()
    cost.observe_embedding(8192, 0.012)
    worth = Worth(cost)
    for _ in range(20):
        assert worth.search(8192, limits) is Search.PASSAGES
        assert worth.embedding(8192, limits)
        worth.learn(lookup_of(8192, finds=False, embedding_s=0.012))


@pytest.mark.parametrize(("queue_s", "expected"), [(0.0, True), (0.1, True), (1.0, False)])
def test_a_plan_that_waits_for_steps_of_others_must_still_pay(queue_s: float, expected: bool) -> None:
    """By as much as shared prompts were seen to wait longer than full ones behind such a queue."""
    cost = learned()
    for seen_s in (0.1, 0.3, 0.5, 0.7, 0.9, 1.1):
        cost.observe_wait(shared=False, queue_s=seen_s, seconds=seen_s)
        cost.observe_wait(shared=True, queue_s=seen_s, seconds=1.6 * seen_s)

    def make(limits: PlannerLimits, rates: Rates) -> Plan | NoPlan:
        work = PrefillWork(819, 8192 * 819 / 2, num_passes=1, num_reused=7373)
        estimate = rates.estimate(8192, work)
        if not limits.threshold.pays(estimate.full_s, estimate.shared_s):
            return NoPlan(Reason.DOES_NOT_PAY, refused_by_rates=True)
        return Plan(8192, 7373, (), (Span(7373, 8192),), (), generation=0, estimate=estimate)

    plan = Worth(cost).plan(make, LIMITS, Queue(computing_s=queue_s))
    assert isinstance(plan, Plan) is expected


@pytest.mark.parametrize(("num_reused", "expected"), [(20, False), (3686, True)])
def test_a_plan_is_tried_where_it_may_pay_if_loads_cost_nothing(num_reused: int, expected: bool) -> None:
    """A load of a few tokens says little of what a long one takes, and the tries are few."""
    worth = Worth(CostModel(replace(TRUE, loads={MEMORY: LoadRate(0.001, 1 / 1e9)})))
    num_computed = 4096 - num_reused

    def make(limits: PlannerLimits, rates: Rates) -> Plan | NoPlan:
        estimate = rates.estimate(4096, PrefillWork(num_computed, 4096 * num_computed / 2))
        if limits.threshold.pays(0.0, 1.0):  # anything does
            spans = (Span(num_reused, 4096),)
            return Plan(4096, num_reused, (), spans, (), generation=0, estimate=estimate)
        return NoPlan(Reason.DOES_NOT_PAY, refused_by_rates=True)

    assert isinstance(worth.plan(make, LIMITS, Queue()), Plan) is expected


def test_host_memory_is_tried_although_copies_from_blocks_are_measured() -> None:
    """Its prior may refuse whatever does not lie in blocks any more."""
    cost = CostModel(replace(TRUE, loads={place: LoadRate(0.0, 1.0) for place in (MEMORY, BLOCKS)}))
    for num_tokens in (4096, 16384):
        cost.observe_prefill(num_tokens, TRUE.full_s(num_tokens))
        cost.observe_load(num_tokens * BYTES, 0.001, place=BLOCKS)
        cost.observe(PrefillWork(400, 1e6, num_steps=0, num_passes=1, num_reused=num_tokens), 0.02)
    plan = Plan(16384, 0, (), (Span(0, 400),), (), 0, cost.rates.estimate(16384, PrefillWork(400, 1e6)))
    refused = NoPlan(Reason.EXACT_ONLY, refused_by_rates=True)  # whatever users are told

    def make(limits: PlannerLimits, _: Rates) -> Plan | NoPlan:
        return refused if limits.threshold is LIMITS.threshold else plan

    worth = Worth(cost)
    assert [worth.plan(make, LIMITS, Queue()) is plan for _ in range(5)] == [True] * 3 + [False] * 2
