"""
The server's rule (`kvshare.sharing.selection`) on a trial.

A probe pass computes the base and the probes. A second pass over the KV that it leaves computes the repairs,
and some of the base again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kvshare.bench.fidelity.rules.base import Choices, num_wanted, pieces, takes_all
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.plan import MAX_LISTENERS, MAX_RENEWED
from kvshare.sharing.selection import Scores, chosen, listeners, probes, renewed, scores


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The results of a probe pass, the same for every budget."""

    scores: Scores  # (T,) of the copied positions
    attended: Scores  # (L, T)
    kv: SequenceKV  # after the pass, with the copied rows of the probes restored


@lru_cache(maxsize=1)  # all budgets of one plan share its probe pass; the result is never written to
def probed(trial: Trial) -> Probed:
    """The probe pass of a trial."""
    stretches = pieces(trial)
    places = probes(stretches, trial.num_tokens)
    rows = trial.base.copy()
    rows[places] = True
    attention, kv = trial.watch(rows)
    listening = np.isin(rows.nonzero()[0], listeners(trial.base))
    at = torch.from_numpy(places)
    changed = (kv.v[:, at] - trial.placed.v[:, at]).flatten(2).norm(dim=2)
    for fresh, old in ((kv.k, trial.placed.k), (kv.v, trial.placed.v)):
        fresh[:, at] = old[:, at]
    attended = attention[:, listening].mean(axis=1)
    return Probed(scores(stretches, attended, places, changed.cpu().numpy()), attended, kv)


def _first_approximate(trial: Trial) -> int:
    return int(trial.copied.argmax()) if trial.copied.any() else trial.num_tokens


def _cost(trial: Trial) -> float:
    """The probes, and what of the base is computed a second time."""
    num_probes = len(probes(pieces(trial), trial.num_tokens))
    stale = int(trial.base[_first_approximate(trial) :].sum())
    listening = min(MAX_LISTENERS, int(trial.base.sum()))
    return float((num_probes + listening + min(MAX_RENEWED, max(0, stale - listening))) * trial.num_layers)


def _kvshare(trial: Trial, budget: float) -> Selection:
    found = probed(trial)
    rows = chosen(found.scores, trial.copied, trial.base, num_wanted(trial, budget))
    again = renewed(found.attended, trial.base, rows, first_approximate=_first_approximate(trial))
    computed = None if takes_all(trial, budget) else trial.base & ~again
    return Selection(rows, probe=_cost(trial), kv=found.kv, computed=computed)


CHOICES: Choices = {"kvshare": (_kvshare, _cost)}
