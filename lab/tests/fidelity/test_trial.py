"""Plans, budgets and passes with repairs: the same for every rule, and at 100 % a full prefill."""

import numpy as np
import pytest
import torch

from delta_tree import Span, token_ids
from kvshare.kv.attention import PartialPass
from kvshare_lab.fidelity.measures import divergence
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.base import num_wanted
from kvshare_lab.fidelity.trial import NUM_FORCED, Selection, Trial, forced_pass
from lab.tests.fidelity.scenes import (
    CANDIDATES,
    CLOSE,
    SYSTEM,
    TAIL,
    A,
    dense,
    engine_kv,
    placed_by_hand,
    places,
    scenes,
    trial,
)

budgeted = pytest.mark.parametrize("name", [rule.name for rule in RULES.values() if rule.has_budget])
BUDGETS = (0.05, 0.1, 0.3, 0.6)


def kl(made: Trial, selection: Selection) -> float:
    return divergence(made.truth, made.run(selection).log_probabilities).kl


def stretches(mask: np.ndarray) -> tuple[Span, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
    return tuple(Span(int(start), int(end)) for start, end in edges)


def test_a_plan_is_what_the_prompts_share() -> None:
    """Two values of three tokens are open, the end is always computed, the equal beginning is exact."""
    made = trial("edited")
    first = len(SYSTEM) + 20
    second = len(SYSTEM) + len(A) + 30
    size = made.num_tokens
    assert made.exact_length == first
    assert places(made.placeholders) == [*range(first, first + 3), *range(second, second + 3), size - 1]
    tail = range(size - TAIL, size)
    assert places(made.base) == sorted({*places(made.placeholders), *tail})
    assert places(made.copied) == [place for place in range(first, size) if not made.base[place]]
    assert {copy.shift for copy in made.approximate_copies} == {0}


@scenes
def test_copies_are_the_stored_kv_moved(scene: str) -> None:
    """The product's KV of the stored prompts, keys rotated to where they go."""
    made = trial(scene)
    k, v = placed_by_hand(made)
    torch.testing.assert_close(made.placed.k[:, : made.num_tokens], k, atol=CLOSE, rtol=0)
    torch.testing.assert_close(made.placed.v[:, : made.num_tokens], v, atol=CLOSE, rtol=0)
    full = engine_kv(made.model, made.scenario.prompt.token_ids)
    chosen = torch.from_numpy(made.copied)
    for found, true, placed in ((made.key_deviation, full.k, k), (made.value_deviation, full.v, v)):
        torch.testing.assert_close(found[:, chosen], (true - placed)[:, chosen], atol=5e-5, rtol=0)
        assert not found[:, torch.from_numpy(made.placeholders)].any()


@scenes
def test_a_run_equals_the_engines_partial_pass(scene: str) -> None:
    """With the same placeholders over the same copies: KV, and log-probabilities along the answer."""
    made = trial(scene)
    rows = np.zeros(made.num_tokens, np.bool_)
    rows[made.copied.nonzero()[0][::7]] = True
    found = made.run(Selection(rows))
    tokens = token_ids(np.concatenate([made.scenario.prompt.token_ids, made.answer[:-1]]))
    kv = made.place(made.copies)
    computed = np.concatenate([made.base | rows, np.ones(NUM_FORCED - 1, np.bool_)])
    expected = made.model.model.logits(
        PartialPass(kv, stretches(computed)), tokens[computed], keep=NUM_FORCED
    )
    torch.testing.assert_close(
        found.log_probabilities, torch.log_softmax(expected, dim=-1), atol=CLOSE, rtol=0
    )
    size = len(tokens)
    torch.testing.assert_close(found.kv.k[:, :size], kv.k[:, :size], atol=CLOSE, rtol=0)
    torch.testing.assert_close(found.kv.v[:, :size], kv.v[:, :size], atol=CLOSE, rtol=0)


@scenes
@budgeted
def test_a_whole_budget_is_a_full_prefill(name: str, scene: str) -> None:
    """Nothing copied is left: KL of at most 1e-6 nats, the same answer."""
    made = trial(scene)
    found = made.run(RULES[name].choose(made, 1.0))
    difference = divergence(made.truth, found.log_probabilities)
    assert difference.kl <= 1e-6
    assert difference.top1 == 1.0
    assert found.b == pytest.approx(made.copied.sum() / made.num_tokens)


@scenes
def test_a_full_prefill_is_itself(scene: str) -> None:
    """Repairing nothing is not, or the tests above would say nothing."""
    made = trial(scene)
    full = made.run(RULES["full"].choose(made, 0.0))
    assert divergence(made.truth, full.log_probabilities).kl <= 1e-6
    assert full.charged == 1.0
    assert kl(made, RULES["placeholders"].choose(made, 0.0)) > 1e-3
    assert kl(made, RULES["prefix"].choose(made, 0.0)) <= 1e-6


@scenes
@budgeted
def test_no_rule_exceeds_its_budget(name: str, scene: str) -> None:
    """One token in all layers is rounding; rules with one set of rows spend it to the token."""
    made, rule = trial(scene), RULES[name]
    for budget in BUDGETS:
        found = made.run(rule.choose(made, budget), forced=False)
        wanted = num_wanted(made, budget)
        assert wanted == min(made.copied.sum(), round(budget * made.num_tokens))
        spent = found.b * made.num_tokens
        if rule.per_layer:
            assert spent <= wanted + 1
        else:
            assert spent == pytest.approx(wanted)
        if name in ("cacheblend", "vlcache", "blend", "mean-shift"):
            assert spent >= wanted - 1


@scenes
@pytest.mark.parametrize("name", sorted(RULES))
def test_the_charge_is_base_repairs_and_probe(name: str, scene: str) -> None:
    """In layer-tokens: what every arm computes, what was repaired, what the selection gave fresh KV."""
    made, rule = trial(scene), RULES[name]
    selection = rule.choose(made, 0.1)
    found = made.run(selection, forced=False)
    size = made.num_layers * made.num_tokens
    base = int(made.base.sum()) * made.num_layers
    assert found.charged * size == pytest.approx(base + found.b * size + selection.probe)
    assert selection.probe <= rule.probe(made)


@scenes
def test_what_selections_cost(scene: str) -> None:
    """Two layers of every copied token that is not repaired, or the base once more, or nothing."""
    made = trial(scene)
    wanted, copied = num_wanted(made, 0.1), int(made.copied.sum())
    for name in ("cacheblend-released", "deviation", "dhd", "blend", "mean-shift"):
        assert RULES[name].choose(made, 0.1).probe == 2 * (copied - wanted)
        assert RULES[name].choose(made, 1.0).probe == 0
    for name in ("query", "query-all", "query-windows"):
        assert RULES[name].choose(made, 0.1).probe == made.base.sum() * made.num_layers
    for name in ("random", "epic", "vlcache", "most-attended", "cache-craft", "default"):
        assert RULES[name].choose(made, 0.1).probe == 0


@scenes
def test_candidates_do_not_see_each_other(scene: str) -> None:
    """Each one's score is that of a pass of its own, and the forced answer is as if they were not there."""
    made = trial(scene)
    for name in ("full", "placeholders", "epic"):
        selection = RULES[name].choose(made, 0.1)
        found, alone = made.run(selection, rank=True), made.run(selection)
        torch.testing.assert_close(found.log_probabilities, alone.log_probabilities, atol=CLOSE, rtol=0)
        assert len(alone.candidate_scores) == 0
        rows = made.base | selection.rows
        for candidate, score in zip(CANDIDATES, found.candidate_scores, strict=True):
            tokens = token_ids(np.concatenate([made.scenario.prompt.token_ids, candidate[:-1]]))
            computed = np.concatenate([rows, np.ones(len(candidate) - 1, np.bool_)])
            kv = made.place(made.copies)
            logits = made.model.model.logits(
                PartialPass(kv, stretches(computed)), tokens[computed], keep=len(candidate)
            )
            chosen = torch.log_softmax(logits, dim=-1)[range(len(candidate)), candidate.astype(np.int64)]
            assert score == pytest.approx(float(chosen.mean()), abs=CLOSE)


def test_a_selection_may_have_its_own_copies() -> None:
    """A selection's own copies stand where the plan's would."""
    made = trial("edited")
    nothing = np.zeros(made.num_tokens, np.bool_)
    exact = [copy for copy in made.copies if copy.target_start < made.exact_length]
    found = made.run(Selection(made.copied, copies=tuple(exact)))
    assert divergence(made.truth, found.log_probabilities).kl <= 1e-6
    empty = made.run(Selection(nothing, copies=tuple(exact)))
    assert not empty.kv.k[:, : made.num_tokens][:, torch.from_numpy(made.copied)].any()


def test_runs_are_what_a_repair_adds() -> None:
    """One in the middle of a copy is one more; one beside a placeholder is none; two neighbours are one."""
    made = trial("edited")
    first = made.exact_length
    middle = first + 20
    for rows, runs in (([middle], 1), ([first + 3], 0), ([middle, middle + 1], 1), ([middle, middle + 3], 2)):
        mask = np.zeros(made.num_tokens, np.bool_)
        mask[rows] = True
        assert made.run(Selection(mask), forced=False).runs == runs


def test_the_answer_is_the_engines_own() -> None:
    """Greedy, token by token behind a full prefill; the truth is its log-probabilities, in any chunks."""
    made = trial("moved")
    model, tokens = made.model, made.scenario.prompt.token_ids
    for token in made.answer:
        logits = forced_pass(model, tokens, token_ids([0]))
        assert int(logits[0].argmax()) == token
        tokens = token_ids([*tokens, token])
    assert len(made.answer) == NUM_FORCED
    assert made.truth.argmax(dim=-1).tolist() == made.answer.tolist()
    for chunk in (16, 77):
        chunked = forced_pass(model, made.scenario.prompt.token_ids, made.answer, chunk=chunk)
        torch.testing.assert_close(chunked, made.truth, atol=CLOSE, rtol=0)


def test_what_is_recorded_of_a_prefill() -> None:
    """Sums of the written-out decoder's attention, means over heads and, but where said, layers."""
    made = trial("moved")
    attention, whole = made.full.attention, made.scenario.prompt
    size = len(whole)
    empty = torch.zeros(made.num_layers, size, 2, 16)
    expected = dense(made.model, whole.token_ids, empty, empty, torch.arange(size))
    by_layer = torch.stack(expected.attention).mean(dim=1).numpy()
    mean = by_layer.mean(axis=0)
    parts = [slice(part.start, part.end) for part in whole.parts]
    to_parts = np.stack([mean[:, part].sum(axis=1) for part in parts], axis=1)
    received = np.concatenate([mean[part, part].sum(axis=0) for part in parts])
    for found, wanted in (
        (attention.to_parts, to_parts),
        (attention.to_itself, mean.diagonal()),
        (attention.received, received),
        (attention.received_at, by_layer.sum(axis=1)),
        (attention.from_last, by_layer[:, -16:].mean(axis=1)),
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_the_base_pass_sees_the_copies() -> None:
    """Attention of the tokens computed anyway, over the copies, before anything is repaired."""
    made = trial("moved")
    k, v = placed_by_hand(made)
    rows = torch.from_numpy(made.base.nonzero()[0])
    expected = dense(made.model, made.scenario.prompt.token_ids, k, v, rows)
    wanted = torch.stack(expected.attention).mean(dim=1).numpy()
    np.testing.assert_allclose(made.base_pass[0], wanted, atol=5e-5)
