"""
Whether sharing is in the way: the bounds of `kvshare bench inway`, and its prompts.

A cell has the seconds of requests of one kind, of one length and at one load, with sharing off and on.
Sharing may make them slower by 3 % or 1 ms at the median, whichever is more, and by 5 % or 3 ms at the 99th
percentile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from delta_tree import TokenIds
from kvshare_lab.vllm.prompts import near_duplicate, unrelated_prompt

KINDS = ("shared", "unshared", "refused")
"""Of prompts: near-duplicates, prompts like no other, and those that share little with a stored one."""
_CHANGED, _EDITS = 0.1, 5  # of a near-duplicate
_REWRITTEN, _REWRITES = 0.9, 40  # of a prompt that is refused


def prompt_of_kind(rng: np.random.Generator, kind: str, donor: TokenIds) -> TokenIds:
    """A new prompt of one of KINDS, as long as the donor."""
    if kind == "unshared":
        return unrelated_prompt(rng, len(donor))
    changed, edits = (_CHANGED, _EDITS) if kind == "shared" else (_REWRITTEN, _REWRITES)
    return near_duplicate(rng, donor, changed=changed, edits=edits)


class _Bound(NamedTuple):
    percentile: int
    share: float
    seconds: float

    @property
    def name(self) -> str:
        return f"p{self.percentile}"

    def allowed_s(self, off_s: float) -> float:
        return off_s + max(self.share * off_s, self.seconds)


MEDIAN, WORST = _Bound(50, 0.03, 0.001), _Bound(99, 0.05, 0.003)


@dataclass(slots=True)
class Cell:
    """`of`: what its requests have in common, by name. `decisions`: of those with sharing on."""

    of: Mapping[str, Any]
    off_s: list[float] = field(default_factory=list)
    on_s: list[float] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)

    @property
    def missed(self) -> list[str]:
        """The bounds that it does not meet."""
        return [bound.name for bound in (MEDIAN, WORST) if self._at(bound, "on") > self._allowed_s(bound)]

    def to_json(self) -> dict[str, Any]:
        """Milliseconds at both percentiles; `slower`: on over off, less 1."""
        bounds = (MEDIAN, WORST)
        off, on = ({each.name: self._at(each, arm) for each in bounds} for arm in ("off", "on"))
        return {
            **self.of,
            "requests": len(self.on_s),
            **{
                f"{arm}_ms": {name: round(1e3 * value, 3) for name, value in found.items()}
                for arm, found in (("off", off), ("on", on))
            },
            "slower": {name: round(on[name] / off[name] - 1, 4) for name in off},
            "decisions": dict(sorted(self.decisions.items())),
            "missed": self.missed,
        }

    def _at(self, bound: _Bound, arm: str) -> float:
        return float(np.percentile(self.off_s if arm == "off" else self.on_s, bound.percentile))

    def _allowed_s(self, bound: _Bound) -> float:
        return bound.allowed_s(self._at(bound, "off"))


class Cells:
    """Found by what they have in common, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._found: dict[tuple[tuple[str, Any], ...], Cell] = {}

    def of(self, **names: Any) -> Cell:
        return self._found.setdefault(tuple(names.items()), Cell(names))

    def __iter__(self) -> Any:
        return iter(self._found.values())


def verdict(cells: Iterable[Cell | Mapping[str, Any]]) -> dict[str, Any]:
    """All cells, and those that miss a bound, in words."""
    rows: Sequence[Mapping[str, Any]] = [cell.to_json() if isinstance(cell, Cell) else cell for cell in cells]
    missed = [in_words(row) for row in rows if row["missed"]]
    return {"cells": rows, "missed": missed, "passed": not missed}


def in_words(row: Mapping[str, Any]) -> str:
    """One line of a cell that misses a bound."""
    names = " ".join(str(row[name]) for name in row if name not in _FIGURES)
    on, off, slower = row["on_ms"], row["off_ms"], row["slower"]
    worse = (
        f"{name} {on[name]:.1f} ms instead of {off[name]:.1f} ({slower[name]:+.1%})" for name in row["missed"]
    )
    return f"{names}: {', '.join(worse)}"


_FIGURES = ("requests", "off_ms", "on_ms", "slower", "decisions", "missed")
