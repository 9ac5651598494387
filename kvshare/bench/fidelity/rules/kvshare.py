"""
The server's rule (`kvshare.sharing.selection`) on a trial.

One probe pass over the base and the probes; behind it the repairs and the listeners are computed, over what
that pass left in the base's slots.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from kvshare.bench.fidelity.rules.base import Rule, num_wanted, pieces, takes_all
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.selection import Mask, Scores, chosen, listeners, probes, scores


@lru_cache(maxsize=1)  # the budgets on one plan share its probe pass; nobody writes to the result
def probed(trial: Trial) -> tuple[Scores, SequenceKV]:
    """(T,) scores of the copied positions, and the KV behind the probe pass: probes as they were laid."""
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
    return scores(stretches, attention[:, listening].mean(axis=1), places, changed.cpu().numpy()), kv


def _again(trial: Trial) -> Mask:
    """(T,) the listeners: they answer, so they are computed once more behind the repairs."""
    rows = np.zeros(trial.num_tokens, np.bool_)
    rows[listeners(trial.base)] = True
    return rows


def _cost(trial: Trial) -> float:
    """The probes, and what is computed a second time; the rest of the base is computed once."""
    num_probes = len(probes(pieces(trial), trial.num_tokens))
    return float((num_probes + _again(trial).sum()) * trial.num_layers)


def _kvshare(trial: Trial, budget: float) -> Selection:
    found, kv = probed(trial)
    rows = chosen(found, trial.copied, trial.base, num_wanted(trial, budget))
    kept = None if takes_all(trial, budget) else trial.base & ~_again(trial)
    return Selection(rows, probe=_cost(trial), kv=kv, kept=kept)


RULES = (Rule("kvshare", "KVShare's rule", "", _kvshare, _cost, published=False),)
