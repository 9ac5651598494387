"""
Reads what the lab has measured: plans with their arms, from JSON lines.

A plan in several files gets the arms of all of them, and an arm the measures of all. Of a measure that comes
twice, the later line counts; files are read in the order of their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvshare.bench.fidelity.statistics import Floats, Pairs
from kvshare.errors import LogError

_NEEDED: Final = {"suite", "half", "number", "source", "labels", "model", "tokens", "arms"}

Row = dict[str, Any]


class Setting(NamedTuple):
    """A rule and its budget. `by`: "b", the budget is for repairs; "charged", for the selection too."""

    rule: str
    by: str
    budget: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan. `row`: the line without its arms. Measures of an arm's free-running answer are `free_...`."""

    suite: str
    source: str
    row: Mapping[str, Any]
    arms: Mapping[Setting, Mapping[str, Any]]

    def measure(self, setting: Setting, name: str) -> float | None:
        """A measure of the arm with this setting; None if there is none."""
        return self.arms.get(setting, {}).get(name)


def read_plans(folder: Path, *, half: int | None = None, model: str | None = None) -> list[Plan]:
    """
    The plans of one half and one model, by suite and number.

    Raises:  LogError where there are no plans, halves or models are mixed, or a line is not a measured plan
    """
    found: dict[tuple[str, str, int, int], Row] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for row in _lines(path):
            if half in (None, row["half"]) and model in (None, row["model"]):
                key = (row["model"], row["suite"], row["half"], row["number"])
                found[key] = _merged(found.get(key), row, path)
    if not found:
        wanted = f"half {'any' if half is None else half}, model {model or 'any'}"
        raise LogError(f"{folder}: no measured plan ({wanted})")
    for name in ("model", "half"):
        if len(several := {row[name] for row in found.values()}) > 1:
            raise LogError(f"{folder}: rows of more than one {name}, choose one of {sorted(several)}")
    return [
        Plan(row["suite"], row["source"], {**row, "arms": None}, row["arms"])
        for _, row in sorted(found.items())
    ]


def by_suite(plans: Iterable[Plan]) -> dict[str, list[Plan]]:
    """Suites in the order of their plans."""
    found: dict[str, list[Plan]] = {}
    for plan in plans:
        found.setdefault(plan.suite, []).append(plan)
    return found


def values(plans: Sequence[Plan], setting: Setting, name: str = "kl") -> tuple[Floats, list[str]]:
    """A measure of the plans that have it, and their sources."""
    has = [plan for plan in plans if plan.measure(setting, name) is not None]
    return np.array([plan.measure(setting, name) for plan in has], float), [plan.source for plan in has]


def pairs(plans: Sequence[Plan], ours: Setting, theirs: Setting, name: str = "kl") -> Pairs:
    """A measure of the plans for which both have it."""
    both = [plan for plan in plans if None not in (plan.measure(ours, name), plan.measure(theirs, name))]
    own, sources = values(both, ours, name)
    return Pairs(sources, own, values(both, theirs, name)[0])


def setting_of(plans: Sequence[Plan], rule: str, by: str, budget: float) -> Setting | None:
    """That rule at that budget; of a rule without budgets (only 0 or 1 was measured) its only setting."""
    known = {setting for plan in plans for setting in plan.arms if setting.rule == rule}
    if (exact := Setting(rule, by, budget)) in known:
        return exact
    return min(known, default=None) if all(setting.budget in (0, 1) for setting in known) else None


def count_unable(plans: Sequence[Plan], setting: Setting) -> int:
    """The number of plans for which the rule's selection alone exceeds the budget."""
    return sum(bool(plan.arms.get(setting, {}).get("cannot")) for plan in plans)


def _lines(path: Path) -> Iterator[Row]:
    """The measured plans of a file, without an unfinished last line of a killed run."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line, parse_constant=_no_measure)
                if "skipped" in row:
                    continue
                if missing := _NEEDED - row.keys():
                    raise KeyError(*missing)
                row["arms"] = {
                    Setting(arm["rule"], arm["by"], round(float(arm["budget"]), 6)): _flat(arm)
                    for arm in row["arms"]
                }
                yield row
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if number < len(lines):
                    raise LogError(f"{path}:{number}: not a measured plan: {error}") from error


def _no_measure(constant: str) -> float:
    raise ValueError(f"{constant} is no measure, expected a finite number")


def _flat(arm: Row) -> Row:
    return {**arm, **{f"free_{name}": value for name, value in (arm.get("free") or {}).items()}}


def _merged(earlier: Row | None, row: Row, path: Path) -> Row:
    if earlier is None:
        return row
    for name in ("source", "tokens"):
        if earlier[name] != row[name]:
            where = f"{path}: {row['suite']} {row['number']}"
            raise LogError(f"{where}: {name} is {row[name]!r}, but {earlier[name]!r} in an earlier line")
    arms = {
        setting: {**earlier["arms"].get(setting, {}), **row["arms"].get(setting, {})}
        for setting in (*earlier["arms"], *row["arms"])
    }
    return {**earlier, **row, "arms": arms}
