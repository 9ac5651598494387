"""The row of one plan: every rule at every budget, and the noise beside it."""

import torch

from delta_tree import TokenIds
from kvshare_lab.fidelity.arms import make_trial, measured
from lab.tests.fidelity.scenes import (
    CANDIDATES,
    QUESTION,
    SETTINGS,
    SYSTEM,
    A,
    B,
    C,
    llama,
    prompt,
    scenario,
    stage,
    text,
    trial_of,
)


def worded(tokens: TokenIds) -> str:
    return " ".join(f"word{token}" for token in tokens)


def test_a_row_has_a_place_for_every_arm() -> None:
    """Budgets by b and charged; a rule whose selection costs too much cannot run; noise beside it."""
    made = trial_of(
        scenario(
            [prompt(SYSTEM, A, B, text(9, 20))],
            prompt(SYSTEM, B, A, QUESTION),
            candidates=CANDIDATES,
            reordered=prompt(SYSTEM, A, B, QUESTION),
            expected="word",
        )
    )
    rules, budgets = ("full", "placeholders", "epic", "deviation"), ((0.1, 0.2), (0.1, 0.9))
    wanted = stage(*rules, budgets=budgets[0], charged=budgets[1], free_tokens=8, noise=True)
    row = measured(made, wanted, decode=worded, other=llama(4, dtype=torch.bfloat16))
    found = {(arm["rule"], arm["by"], arm["budget"]): arm for arm in row["arms"]}
    assert len(found) == 2 + 2 * 4
    assert found["full", "b", 0.0]["kl"] <= 1e-6
    free = found["full", "b", 0.0]["free"]
    assert (free["agree"], free["first"], free["equal"], free["f1"], free["exact"]) == (1.0, 8, 1, 1.0, 1)
    assert not found["placeholders", "b", 0.0]["free"]["equal"]
    assert found["deviation", "charged", 0.1] == {
        "rule": "deviation",
        "budget": 0.1,
        "by": "charged",
        "cannot": True,
    }
    base = made.base.sum() / made.num_tokens
    for name, budget in (("epic", 0.1), ("epic", 0.9), ("deviation", 0.9)):
        assert found[name, "charged", budget]["charged"] - base <= budget + 1 / made.num_tokens
    assert set(row["noise"]) == {"chunked", "bfloat16", "reordered"}
    assert row["noise"]["chunked"]["kl"] <= 1e-6 < row["noise"]["bfloat16"]["kl"]
    assert row["noise"]["bfloat16"]["kl"] < row["noise"]["reordered"]["kl"]
    assert row["copied"] == made.copied.sum()
    assert row["moved"] == 1.0


def test_a_prompt_that_can_copy_nothing_is_no_trial() -> None:
    """Nothing in common but the beginning."""
    stored = prompt(SYSTEM, A, QUESTION)
    assert make_trial(scenario([stored], prompt(SYSTEM, C, text(12, 24))), llama(), SETTINGS) is None
