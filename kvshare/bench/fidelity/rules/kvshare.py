"""
The server's rule (`kvshare.sharing.selection`) on a trial.

One probe pass over the base and the probes; behind it the repairs are computed, and some of the base again,
over what that pass left in its slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kvshare.bench.fidelity.rules.base import Rule, num_wanted, pieces, takes_all
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED
from kvshare.sharing.selection import Scores, chosen, listeners, probes, renewed, scores


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What a probe pass says, whatever the budget."""

    scores: Scores  # (T,) of the copied positions
    attended: Scores  # (L, T)
    kv: SequenceKV  # behind it: probes as they were laid


@lru_cache(maxsize=1)  # the budgets on one plan share its probe pass; nobody writes to the result
def probed(trial: Trial) -> Probed:
    """The probe pass of a trial."""
    stretches = pieces(trial)
    places = probes(stretches, trial.num_tokens)
    rows = trial.base.copy()
    rows[places] = True
    attention, kv = trial.watch(rows)
    listening = np.isin(rows.nonzero()[0], listeners(trial.base))
    there = torch.from_numpy(places)
    changed = (kv.v[:, there] - trial.laid.v[:, there]).flatten(2).norm(dim=2)
    for fresh, old in ((kv.k, trial.laid.k), (kv.v, trial.laid.v)):
        fresh[:, there] = old[:, there]
    attended = attention[:, listening].mean(axis=1)
    return Probed(scores(stretches, attended, places, changed.cpu().numpy()), attended, kv)


def _first_approximate(trial: Trial) -> int:
    return int(trial.copied.argmax()) if trial.copied.any() else trial.num_tokens


def _cost(trial: Trial) -> float:
    """The probes, and what is computed a second time; the rest of the base is computed once."""
    num_probes = len(probes(pieces(trial), trial.num_tokens))
    stale = int(trial.base[_first_approximate(trial) :].sum())
    listening = min(MAX_LISTENERS, int(trial.base.sum()))
    return float((num_probes + listening + min(MAX_RENEWED, max(0, stale - listening))) * trial.num_layers)


def _kvshare(trial: Trial, budget: float) -> Selection:
    found = probed(trial)
    rows = chosen(found.scores, trial.copied, trial.base, num_wanted(trial, budget))
    again = renewed(found.attended, trial.base, rows, first_approximate=_first_approximate(trial))
    kept = None if takes_all(trial, budget) else trial.base & ~again
    return Selection(rows, probe=_cost(trial), kv=found.kv, kept=kept)


RULES = (Rule("kvshare", "KVShare's rule", "", _kvshare, _cost, published=False),)
