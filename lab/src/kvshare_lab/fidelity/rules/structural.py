"""Rules that look at places alone: the starts and ends of copies, pieces, chunks and documents."""

import numpy as np

from kvshare.sharing.placed import placed
from kvshare.sharing.plan import MAX_SMALL_SHIFT
from kvshare.sharing.repair import repairs_by_place
from kvshare.sharing.repair_choice import Scores, covered, highest
from kvshare_lab.fidelity.rules.base import Choices, chunks, cut, heads, no_probe, num_wanted, pieces
from kvshare_lab.fidelity.scenario import SEED
from kvshare_lab.fidelity.trial import Selection, Trial

_BLOCK = 256  # tokens: a copied block of SCR


def _edited_parts(trial: Trial, budget: float) -> Selection:
    """Parts that were stored without a change are copied; a part with an edit is computed as a whole."""
    rows = np.zeros(trial.num_tokens, np.bool_)
    for part in trial.scenario.prompt.parts:
        inside = slice(part.start, min(part.end, trial.num_tokens - trial.settings.repair.tail))
        rows[inside] = trial.placeholders[inside].any()
    return Selection(rows & trial.copied)


def server_windows(trial: Trial, max_small_shift: int | None = None) -> Selection:
    """What the server repairs by place. `max_small_shift`: instead of its limit, a tenth of the prompt."""
    repair, size = trial.settings.repair, trial.num_tokens
    copies = placed(trial.approximate_copies)
    spans = repairs_by_place(copies, num_tokens=size, settings=repair, max_small_shift=max_small_shift)
    return Selection(covered(spans, size) & trial.copied)


def _random(trial: Trial, budget: float) -> Selection:
    rng = np.random.default_rng([SEED, trial.scenario.number, round(1000 * budget)])
    scores = rng.random(trial.num_tokens)
    return Selection(highest(scores, trial.copied, num_wanted(trial, budget)))


def _epic(trial: Trial, budget: float) -> Selection:
    """The first tokens of every chunk; those of a chunk at position 0 only when all others are repaired."""
    size, count = trial.num_tokens, num_wanted(trial, budget)
    rows = heads([chunk for chunk in chunks(trial) if chunk.start > 0], size, count)
    first = [chunk for chunk in chunks(trial) if chunk.start == 0]
    return Selection(rows | heads(first, size, count - int(rows.sum())))


def _edit_windows(trial: Trial, budget: float) -> Selection:
    """A contiguous window behind each edit, which is at the start of each piece."""
    return Selection(heads(pieces(trial), trial.num_tokens, num_wanted(trial, budget)))


def _block_ends(trial: Trial, budget: float) -> Selection:
    """The last tokens of each copied block."""
    starts = [place for piece in pieces(trial) for place in range(piece.start, piece.end, _BLOCK)]
    blocks = cut(trial.copied, starts)
    return Selection(heads(blocks, trial.num_tokens, num_wanted(trial, budget), from_end=True))


def _vlcache(trial: Trial, budget: float) -> Selection:
    """
    The first r_l tokens of each piece in layer l; r_l falls with depth as the deviation behind layer l does.

    It is calibrated on the plan itself, as no server could: the published rule cannot do better.
    """
    deviation = trial.value_deviation.flatten(1).norm(dim=1).numpy()
    copied = trial.placed.v[:, : trial.num_tokens].flatten(1).norm(dim=1).cpu().numpy()
    relative = deviation / np.maximum(copied, 1e-6)
    remaining = np.cumsum(relative[::-1])[::-1]  # deviation that computing a layer can still remove
    total = num_wanted(trial, budget) * trial.num_layers
    counts = _shared_out(remaining, total, int(trial.copied.sum()))
    return Selection(np.stack([heads(pieces(trial), trial.num_tokens, count) for count in counts]))


def _shared_out(weights: Scores, total: int, most: int) -> list[int]:
    """`total` in proportion to falling weights; the counts fall too, and none exceeds `most`."""
    counts = np.zeros(len(weights))
    is_open = np.ones(len(weights), np.bool_)
    left = float(total)
    while left > 1e-6 and is_open.any() and weights[is_open].sum() > 0:
        counts[is_open] += left * weights[is_open] / weights[is_open].sum()
        is_open = counts < most
        left = float(np.maximum(counts - most, 0).sum())
        counts = np.minimum(counts, most)
    whole = np.floor(counts + 1e-6).astype(int)
    while (missing := total - int(whole.sum())) > 0:
        whole[np.flatnonzero(whole < most)[:missing]] += 1
    return [int(count) for count in np.minimum.accumulate(whole)]


CHOICES: Choices = {
    name: (choose, no_probe)
    for name, choose in {
        "placeholders": lambda trial, budget: Selection(np.zeros(trial.num_tokens, np.bool_)),
        "full-reuse": _edited_parts,
        "prefix": lambda trial, budget: Selection(trial.copied.copy()),
        "full": lambda trial, budget: Selection(np.ones(trial.num_tokens, np.bool_), copies=()),
        "default": lambda trial, budget: server_windows(trial),
        "default-512": lambda trial, budget: server_windows(trial, MAX_SMALL_SHIFT),
        "random": _random,
        "epic": _epic,
        "edit-windows": _edit_windows,
        "block-ends": _block_ends,
        "vlcache": _vlcache,
    }.items()
}
