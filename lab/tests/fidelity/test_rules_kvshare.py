"""Our own rule on trials: what it costs, and that it can be served. Its choice: test_repair_choice.py."""

import numpy as np
import pytest

from kvshare.sharing.repair_choice import listeners, probes
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.rules.attention import probed
from kvshare_lab.fidelity.rules.base import num_wanted, pieces
from lab.tests.fidelity.scenes import scenes, trial


@scenes
@pytest.mark.parametrize("budget", [0.05, 0.1, 0.2, 0.5])
def test_it_can_be_served(scene: str, budget: float) -> None:
    """One set of positions for all layers, few runs, few probes; the whole budget is spent."""
    made, rule = trial(scene), RULES["kvshare"]
    selection = rule.choose(made, budget)
    assert selection.rows.shape == (made.num_tokens,)
    assert selection.rows.sum() == num_wanted(made, budget)
    assert not (selection.rows & ~made.copied).any()
    assert made.run(selection, forced=False).runs <= 32
    places = probes(pieces(made), made.num_tokens)
    assert len(places) <= min(64, 0.03 * made.num_tokens)
    assert selection.computed is not None
    again = int((made.base & ~selection.computed).sum())
    assert again <= 32 + 64
    assert selection.probe == (len(places) + again) * made.num_layers


@scenes
def test_copies_of_probes_are_restored(scene: str) -> None:
    """They are measured, not repaired: all copies are the plan's, except those that the budget repairs."""
    made = trial(scene)
    kv = probed(made).kv
    copied = made.copied.nonzero()[0]
    assert (kv.k[:, copied] == made.placed.k[:, copied]).all()
    assert (kv.v[:, copied] == made.placed.v[:, copied]).all()


@scenes
def test_listeners_are_computed_again_and_nothing_that_saw_nothing_stale(scene: str) -> None:
    made = trial(scene)
    computed = RULES["kvshare"].choose(made, 0.05).computed
    assert computed is not None
    assert not computed[listeners(made.base)].any()
    exact = made.base.copy()
    exact[listeners(made.base)] = False
    exact[made.copied.argmax() :] = False
    assert computed[exact].all()


def test_what_is_listened_to_and_changed_scores_highest() -> None:
    """Scores of a real trial are positive where something is copied, and nowhere else."""
    made = trial("edited")
    scores = probed(made).scores
    assert (scores[made.copied] > 0).all()
    assert not scores[~made.copied].any()
    assert np.isfinite(scores).all()
