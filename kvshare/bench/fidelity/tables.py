"""Every rule at every budget in every suite: what was measured, as rows of plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from kvshare.bench.fidelity.rows import Plan, Row, Setting, by_suite, count_unable, pairs, setting_of, values
from kvshare.bench.fidelity.statistics import Floats, mean, ratio, wilson

BASELINE: Final = "placeholders"
FULL: Final = "full"
NOTABLE: Final = 0.05  # nats: the share of plans above it stands beside every mean
_FACTS: Final = ("tokens", "exact", "copied", "computed", "pieces", "moved")
_MEANS: Final = ("top1", "kl_first", "b", "charged", "runs")


def suites(plans: Sequence[Plan]) -> list[Row]:
    """What the plans are: means over them."""
    return [
        {"suite": suite, **_numbers(own)}
        | {
            name: _mean([row[name] for plan in own if (row := plan.row).get(name) is not None])
            for name in _FACTS
        }
        for suite, own in by_suite(plans).items()
    ]


def results(plans: Sequence[Plan]) -> list[Row]:
    """KL and what stands beside it, a row for each suite, rule and budget."""
    return [
        {"suite": suite, **_named(setting), **_result(own, setting)}
        for suite, own in by_suite(plans).items()
        for setting in _settings(own)
    ]


def labels(plans: Sequence[Plan]) -> list[Row]:
    """KL at equal b for each value of each label that has several."""
    return [
        {"suite": suite, "label": label, "value": value, **_named(setting), **_kl(chosen, setting)}
        for suite, own in by_suite(plans).items()
        for label, groups in _groups(own).items()
        for value, chosen in groups.items()
        for setting in _settings(chosen)
        if setting.by == "b"
    ]


def noise(plans: Sequence[Plan]) -> list[Row]:
    """What changes without any sharing: a row for each suite and way to compute the same prompt."""
    rows = []
    for suite, own in by_suite(plans).items():
        kinds = sorted({kind for plan in own for kind in plan.row.get("noise") or ()})
        for kind in kinds:
            chosen = [plan for plan in own if kind in (plan.row.get("noise") or ())]
            found = [plan.row["noise"][kind] for plan in chosen]
            kl = mean(np.array([one["kl"] for one in found]), [plan.source for plan in chosen])
            rest = {name: _mean([one[name] for one in found if name in one]) for name in ("kl_first", "top1")}
            rows.append({"suite": suite, "kind": kind, **_numbers(chosen), "kl": asdict(kl), **rest})
    return rows


def answers(plans: Sequence[Plan]) -> list[Row]:
    """The gold answer's rank and margin, and answers written freely; `plans`: how many have either."""
    rows = []
    for suite, own in by_suite(plans).items():
        for setting in _settings(own):
            chosen = [plan for plan in own if _answered(plan.arms.get(setting, {}))]
            if chosen:
                rows.append(
                    {"suite": suite, **_named(setting), **_numbers(chosen), **_answer(chosen, setting)}
                )
    return rows


def regimes(plans: Sequence[Plan], query_guided: str, windows: str) -> list[Row]:
    """Where which wins: the ratio of the two rules, and how much of the prompt has moved."""
    rows = []
    for suite, own in by_suite(plans).items():
        for setting in [one for one in _settings(own) if one.rule == query_guided and one.by == "b"]:
            both = pairs(own, setting, setting._replace(rule=windows))
            if len(both):
                moved = _mean([plan.row["moved"] for plan in own if plan.row.get("moved") is not None])
                found = {"suite": suite, "budget": setting.budget, "plans": len(both)}
                rows.append({**found, "moved": moved, "ratio": asdict(ratio(both))})
    return rows


def _result(plans: Sequence[Plan], setting: Setting) -> Row:
    found = {name: _mean(values(plans, setting, name)[0]) for name in _MEANS}
    row = {**_kl(plans, setting), **found, "cannot": count_unable(plans, setting) or None}
    own, _ = values(plans, setting)
    if not len(own):
        return row | {"median": None, "above": None}
    above = wilson(int((own > NOTABLE).sum()), len(own))
    return row | {"median": float(np.median(own)), "above": asdict(above)}


def _kl(plans: Sequence[Plan], setting: Setting) -> Row:
    own, sources = values(plans, setting)
    baseline = setting_of(plans, BASELINE, "b", 0.0)
    both = pairs(plans, setting, baseline) if baseline and baseline != setting else ()
    return {
        "plans": len(own),
        "sources": len({*sources}),
        "kl": asdict(mean(own, sources)) if len(own) else None,
        "ratio": asdict(ratio(both)) if both else None,
    }


def _answer(plans: Sequence[Plan], setting: Setting) -> Row:
    free = dict.fromkeys(name for plan in plans for name in plan.arms[setting] if name.startswith("free_"))
    row: Row = {name: _mean(values(plans, setting, name)[0]) for name in ("margin", "rank", *free)}
    full = setting_of(plans, FULL, "b", 0.0)
    both = pairs(plans, setting, full, "margin") if full and full != setting else ()
    return row | {"margin_to_full": asdict(mean(both.ours - both.theirs, both.sources)) if both else None}


def _answered(arm: Mapping[str, Any]) -> bool:
    return any(arm.get(name) is not None for name in ("margin", "rank", "free"))


def _groups(plans: Sequence[Plan]) -> dict[str, dict[str | int, list[Plan]]]:
    """Label -> value -> plans."""
    names = sorted({name for plan in plans for name in plan.row["labels"]})
    found: dict[str, dict[str | int, list[Plan]]] = {name: {} for name in names}
    for name in names:
        have = [plan for plan in plans if name in plan.row["labels"]]
        for plan in sorted(have, key=lambda plan: _in_order(plan.row["labels"][name])):
            found[name].setdefault(plan.row["labels"][name], []).append(plan)
    return {name: groups for name, groups in found.items() if len(groups) > 1}


def _in_order(value: str | int) -> tuple[bool, str | int]:
    return (isinstance(value, str), value)


def _settings(plans: Sequence[Plan]) -> list[Setting]:
    return sorted({setting for plan in plans for setting in plan.arms})


def _named(setting: Setting) -> Row:
    return {"rule": setting.rule, "by": setting.by, "budget": setting.budget}


def _numbers(plans: Sequence[Plan]) -> Row:
    return {"plans": len(plans), "sources": len({plan.source for plan in plans})}


def _mean(found: Sequence[float] | Floats) -> float | None:
    return float(np.mean(found)) if len(found) else None
