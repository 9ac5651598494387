"""Rules that look at places alone: where copies begin and end, and where documents do."""

from __future__ import annotations

import numpy as np

from kvshare.bench.fidelity.rules.base import Rule, chunks, cut, heads, num_wanted, pieces
from kvshare.bench.fidelity.scenario import SEED
from kvshare.bench.fidelity.shelf import covered
from kvshare.bench.fidelity.trial import Selection, Trial
from kvshare.sharing.plan import MAX_SMALL_SHIFT
from kvshare.sharing.repair import repairs_by_place
from kvshare.sharing.selection import Scores, highest

_BLOCK = 256  # tokens: a copied block of SCR


def _nothing(trial: Trial, budget: float) -> Selection:
    return Selection(np.zeros(trial.num_tokens, np.bool_))


def _all(trial: Trial, budget: float) -> Selection:
    everything = np.ones(trial.num_tokens, np.bool_)
    return Selection(everything, copies=())


def _prefix(trial: Trial, budget: float) -> Selection:
    return Selection(trial.copied.copy())


def _full_reuse(trial: Trial, budget: float) -> Selection:
    """Parts that were stored as they are are reused; one with an edit is computed as a whole."""
    rows = np.zeros(trial.num_tokens, np.bool_)
    for part in trial.scenario.prompt.parts:
        inside = slice(part.start, min(part.end, trial.num_tokens - trial.settings.repair.tail))
        rows[inside] = trial.placeholders[inside].any()
    return Selection(rows & trial.copied)


def server_windows(trial: Trial, max_small_shift: int | None = None) -> Selection:
    """What the server repairs where it repairs by place. `max_small_shift`: without its limit of a tenth."""
    spans = repairs_by_place(
        trial.foreign,
        num_tokens=trial.num_tokens,
        settings=trial.settings.repair,
        max_small_shift=max_small_shift,
    )
    return Selection(covered(spans, trial.num_tokens) & trial.copied)


def _default(trial: Trial, budget: float) -> Selection:
    return server_windows(trial)


def _default_512(trial: Trial, budget: float) -> Selection:
    return server_windows(trial, max_small_shift=MAX_SMALL_SHIFT)


def _random(trial: Trial, budget: float) -> Selection:
    rng = np.random.default_rng([SEED, trial.scenario.number, round(1000 * budget)])
    scores = rng.random(trial.num_tokens)
    return Selection(highest(scores, trial.copied, num_wanted(trial, budget)))


def _epic(trial: Trial, budget: float) -> Selection:
    """The first k tokens of every chunk but the first of the prompt, which gets what they leave over."""
    size, count = trial.num_tokens, num_wanted(trial, budget)
    behind = [chunk for chunk in chunks(trial) if chunk.start > 0]
    first = [chunk for chunk in chunks(trial) if chunk.start == 0]
    rows = heads(behind, size, count)
    return Selection(rows | heads(first, size, count - int(rows.sum())))


def _edit_windows(trial: Trial, budget: float) -> Selection:
    """A contiguous window behind each edit, that is at the start of each piece."""
    return Selection(heads(pieces(trial), trial.num_tokens, num_wanted(trial, budget)))


def _block_ends(trial: Trial, budget: float) -> Selection:
    """The last tokens of each copied block."""
    starts = [place for piece in pieces(trial) for place in range(piece.start, piece.end, _BLOCK)]
    blocks = cut(trial.copied, starts)
    return Selection(heads(blocks, trial.num_tokens, num_wanted(trial, budget), from_end=True))


def _vlcache(trial: Trial, budget: float) -> Selection:
    """
    The first r_l of each reused piece in layer l; r_l falls with depth as the deviation behind layer l does.

    Calibrated on the plan itself, which no server could: the published rule cannot be better placed.
    """
    deviation = trial.value_deviation.flatten(1).norm(dim=1).numpy()
    laid = trial.laid.v[:, : trial.num_tokens].flatten(1).norm(dim=1).cpu().numpy()
    relative = deviation / np.maximum(laid, 1e-6)
    left = np.cumsum(relative[::-1])[::-1]  # what computing a layer can still set right
    places = trial.copied.nonzero()[0]
    total = num_wanted(trial, budget) * trial.num_layers
    counts = _shared_out(left, total, len(places))
    rows = np.zeros((trial.num_layers, trial.num_tokens), np.bool_)
    for layer, count in enumerate(counts):
        rows[layer] = heads(pieces(trial), trial.num_tokens, count)
    return Selection(rows)


def _shared_out(weights: Scores, total: int, most: int) -> list[int]:
    """`total` in proportion to falling weights, none above `most`, falling too."""
    counts = np.zeros(len(weights))
    open_ = np.ones(len(weights), np.bool_)
    left = float(total)
    while left > 1e-6 and open_.any() and weights[open_].sum() > 0:
        counts[open_] += left * weights[open_] / weights[open_].sum()
        open_ = counts < most
        left = float(np.maximum(counts - most, 0).sum())
        counts = np.minimum(counts, most)
    whole = np.floor(counts + 1e-6).astype(int)
    while (missing := total - int(whole.sum())) > 0:
        whole[np.flatnonzero(whole < most)[:missing]] += 1
    return [int(count) for count in np.minimum.accumulate(whole)]


RULES = (
    Rule("placeholders", "placeholders only (KVShare)", "arXiv:2503.16525", _nothing, has_budget=False),
    Rule(
        "full-reuse",
        "full reuse of whole parts",
        "PromptCache, arXiv:2311.04934",
        _full_reuse,
        has_budget=False,
    ),
    Rule("prefix", "prefix cache", "", _prefix, has_budget=False, published=False),
    Rule("full", "full prefill", "", _all, has_budget=False, published=False),
    Rule(
        "default",
        "the server's default",
        "",
        _default,
        has_budget=False,
        published=False,
    ),
    Rule(
        "default-512",
        "the default before small shifts were capped at a tenth",
        "",
        _default_512,
        has_budget=False,
        published=False,
    ),
    Rule("random", "random", "Cache-Craft's baseline", _random),
    Rule("epic", "after EPIC (chunk heads)", "arXiv:2410.15332", _epic, after=True),
    Rule("edit-windows", "after edit-local windows", "arXiv:2609.17983", _edit_windows, after=True),
    Rule("block-ends", "after SCR (block ends)", "Suffix Cache Reuse", _block_ends, after=True),
    Rule("vlcache", "after VLCache", "arXiv:2512.12977", _vlcache, after=True, per_layer=True),
)
