"""Our own rule on trials: what it costs, and that it can be served. Its choice: sharing/test_selection.py."""

import numpy as np
import pytest

from kvshare.bench.fidelity.rules import RULES
from kvshare.bench.fidelity.rules.base import num_wanted, pieces
from kvshare.bench.fidelity.rules.kvshare import probed
from kvshare.sharing.selection import listeners, probes
from tests.kvshare.bench.fidelity.scenes import SCENES, trial

scenes = pytest.mark.parametrize("scene", sorted(SCENES))


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
    assert selection.kept is not None
    again = int((made.base & ~selection.kept).sum())
    assert again <= 32 + 64
    assert selection.probe == (len(places) + again) * made.num_layers


@scenes
def test_probes_stand_as_they_were_laid(scene: str) -> None:
    """They are measured, not repaired: what is copied is the plan's, but for what the budget buys."""
    made = trial(scene)
    kv = probed(made).kv
    copied = made.copied.nonzero()[0]
    assert (kv.k[:, copied] == made.laid.k[:, copied]).all()
    assert (kv.v[:, copied] == made.laid.v[:, copied]).all()


@scenes
def test_listeners_are_computed_again_and_nothing_that_saw_nothing_stale(scene: str) -> None:
    made = trial(scene)
    kept = RULES["kvshare"].choose(made, 0.05).kept
    assert kept is not None
    assert not kept[listeners(made.base)].any()
    exact = made.base.copy()
    exact[listeners(made.base)] = False
    exact[made.copied.argmax() :] = False
    assert kept[exact].all()


def test_what_is_listened_to_and_changed_scores_highest() -> None:
    """Scores of a real trial are positive where something is copied, and nowhere else."""
    made = trial("edited")
    scores = probed(made).scores
    assert (scores[made.copied] > 0).all()
    assert not scores[~made.copied].any()
    assert np.isfinite(scores).all()
