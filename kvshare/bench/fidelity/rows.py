"""
What the lab has measured: plans with their arms, read from JSON lines.

A plan measured in several files has the arms of all of them, and an arm the measures of all; where a measure
comes twice, the later line holds, files in the order of their names.
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
    """A rule, and how much it may spend; `by`: "b", what it repairs, or "charged", its selection too."""

    rule: str
    by: str
    budget: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan; `row`: the line without its arms. Of an arm, what is measured running free is `free_...`."""

    suite: str
    source: str
    row: Mapping[str, Any]
    arms: Mapping[Setting, Mapping[str, Any]]


def read_plans(folder: Path, *, half: int | None = None, model: str | None = None) -> list[Plan]:
    """
    The plans of one half and one model, by suite and number.

    Raises:  LogError where there is none, where halves or models are mixed, or a line cannot be what it says
    """
    found: dict[tuple[str, str, int, int], Row] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for row in _lines(path):
            if half in (None, row["half"]) and model in (None, row["model"]):
                key = (row["model"], row["suite"], row["half"], row["number"])
                found[key] = _merged(found.get(key), row, path)
    if not found:
        raise LogError(f"{folder}: no measured plan of half {half}, model {model} (None: any)")
    for name in ("model", "half"):
        if len(several := {row[name] for row in found.values()}) > 1:
            raise LogError(f"{folder}: several of {name}, choose one: {sorted(several)}")
    return [
        Plan(row["suite"], row["source"], {**row, "arms": None}, row["arms"])
        for _, row in sorted(found.items())
    ]


def by_suite(plans: Iterable[Plan]) -> dict[str, list[Plan]]:
    """Suites in the order of their names."""
    found: dict[str, list[Plan]] = {}
    for plan in plans:
        found.setdefault(plan.suite, []).append(plan)
    return found


def values(plans: Sequence[Plan], setting: Setting, name: str = "kl") -> tuple[Floats, list[str]]:
    """A measure of the plans that have it, and their sources."""
    found = [(plan.arms[setting], plan.source) for plan in plans if setting in plan.arms]
    kept = [(float(arm[name]), source) for arm, source in found if arm.get(name) is not None]
    return np.array([value for value, _ in kept]), [source for _, source in kept]


def pairs(plans: Sequence[Plan], ours: Setting, theirs: Setting, name: str = "kl") -> Pairs:
    """A measure of the plans where both have it."""
    both = [
        (plan.arms[ours], plan.arms[theirs], plan) for plan in plans if {ours, theirs} <= plan.arms.keys()
    ]
    kept = [
        (plan.source, one[name], other[name])
        for one, other, plan in both
        if one.get(name) is not None and other.get(name) is not None
    ]
    sources = [source for source, _, _ in kept]
    return Pairs(sources, np.array([one for _, one, _ in kept]), np.array([other for _, _, other in kept]))


def setting_of(plans: Sequence[Plan], rule: str, by: str, budget: float) -> Setting | None:
    """That rule at that budget, or as it always is if it has none of its own (only 0 or 1 was ever run)."""
    known = {setting for plan in plans for setting in plan.arms if setting.rule == rule}
    if (exact := Setting(rule, by, budget)) in known:
        return exact
    return min(known, default=None) if all(setting.budget in (0, 1) for setting in known) else None


def count_unable(plans: Sequence[Plan], setting: Setting) -> int:
    """On how many plans the rule's selection alone costs more than the budget."""
    return sum(bool(plan.arms.get(setting, {}).get("cannot")) for plan in plans)


def _lines(path: Path) -> Iterator[Row]:
    """A last line that a killed run left unfinished is no row."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line, parse_constant=_refused)
                if "skipped" in row:
                    continue
                if missing := _NEEDED - row.keys():
                    raise KeyError(*missing)
                row["arms"] = {_setting(arm): _flat(arm) for arm in row["arms"]}
                yield row
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if number < len(lines):
                    raise LogError(f"{path}:{number}: not a measured plan: {error}") from error


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no measure")


def _setting(arm: Row) -> Setting:
    return Setting(arm["rule"], arm["by"], round(float(arm["budget"]), 6))


def _flat(arm: Row) -> Row:
    return {**arm, **{f"free_{name}": value for name, value in (arm.get("free") or {}).items()}}


def _merged(earlier: Row | None, row: Row, path: Path) -> Row:
    if earlier is None:
        return row
    for name in ("source", "tokens"):
        if earlier[name] != row[name]:
            where = f"{path}: {row['suite']} {row['number']}"
            raise LogError(f"{where}: {name} {row[name]!r}, in an earlier line {earlier[name]!r}")
    arms = {
        setting: {**earlier["arms"].get(setting, {}), **row["arms"].get(setting, {})}
        for setting in (*earlier["arms"], *row["arms"])
    }
    return {**earlier, **row, "arms": arms}
