"""The tables of the report as rows of plain data: every rule at every budget in every suite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from kvshare.bench.fidelity.rows import Plan, Row, Setting, by_suite, count_unable, pairs, setting_of, values
from kvshare.bench.fidelity.statistics import Floats, mean, ratio, wilson

BASELINE: Final = "placeholders"
FULL: Final = "full"
_NOTABLE: Final = 0.05  # nats: beside every mean is the share of plans above it
_FACTS: Final = ("tokens", "exact", "copied", "computed", "pieces", "moved")
_MEANS: Final = ("top1", "kl_first", "b", "charged", "runs")


def suites(plans: Sequence[Plan]) -> list[Row]:
    """Means over the plans of a suite: prompt length, what is copied and what is computed."""
    return [
        {"suite": suite, **_numbers(own), **{name: _mean_fact(own, name) for name in _FACTS}}
        for suite, own in by_suite(plans).items()
    ]


def results(plans: Sequence[Plan]) -> list[Row]:
    """KL, further measures and costs, a row for each suite, rule and budget."""
    return [
        {"suite": suite, **setting._asdict(), **_result(own, setting)}
        for suite, own, setting in _by_setting(plans)
    ]


def labels(plans: Sequence[Plan]) -> list[Row]:
    """KL at equal b for each value of each label that has several."""
    return [
        {"suite": suite, "label": label, "value": value, **setting._asdict(), **_kl(chosen, setting)}
        for suite, own in by_suite(plans).items()
        for label, groups in _by_label(own).items()
        for value, chosen in groups.items()
        for _, _, setting in _by_setting(chosen)
        if setting.by == "b"
    ]


def noise(plans: Sequence[Plan]) -> list[Row]:
    """Divergence without any sharing: a row for each suite and way to compute the same prompt."""
    rows = []
    for suite, own in by_suite(plans).items():
        for kind in sorted({kind for plan in own for kind in plan.row.get("noise") or ()}):
            chosen = [plan for plan in own if kind in (plan.row.get("noise") or ())]
            found = [plan.row["noise"][kind] for plan in chosen]
            kl = mean(np.array([one["kl"] for one in found]), [plan.source for plan in chosen])
            rest = {name: _mean([one[name] for one in found if name in one]) for name in ("kl_first", "top1")}
            rows.append({"suite": suite, "kind": kind, **_numbers(chosen), "kl": asdict(kl), **rest})
    return rows


def answers(plans: Sequence[Plan]) -> list[Row]:
    """Rank and margin of the right answer, and scores of free-running ones, over plans that have either."""
    rows = []
    for suite, own, setting in _by_setting(plans):
        if chosen := [plan for plan in own if _is_answered(plan.arms.get(setting, {}))]:
            numbers = {**_numbers(chosen), **_answer(chosen, setting)}
            rows.append({"suite": suite, **setting._asdict(), **numbers})
    return rows


def regimes(plans: Sequence[Plan], query_guided: str, windows: str) -> list[Row]:
    """By suite, the ratio of the two rules' KL, and the mean share of copied tokens that moved."""
    rows = []
    for suite, own, setting in _by_setting(plans):
        if setting.rule != query_guided or setting.by != "b":
            continue
        if both := pairs(own, setting, setting._replace(rule=windows)):
            found = {"suite": suite, "budget": setting.budget, "plans": len(both)}
            rows.append({**found, "moved": _mean_fact(own, "moved"), "ratio": asdict(ratio(both))})
    return rows


def _by_setting(plans: Sequence[Plan]) -> Iterator[tuple[str, list[Plan], Setting]]:
    """Each suite with its plans, once for each setting that any of them has, sorted."""
    for suite, own in by_suite(plans).items():
        for setting in sorted({setting for plan in own for setting in plan.arms}):
            yield suite, own, setting


def _result(plans: Sequence[Plan], setting: Setting) -> Row:
    found = {name: _mean(values(plans, setting, name)[0]) for name in _MEANS}
    row = {**_kl(plans, setting), **found, "cannot": count_unable(plans, setting) or None}
    own, _ = values(plans, setting)
    if not len(own):
        return row | {"median": None, "above": None}
    above = wilson(int((own > _NOTABLE).sum()), len(own))
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


def _is_answered(arm: Mapping[str, Any]) -> bool:
    return any(arm.get(name) is not None for name in ("margin", "rank", "free"))


def _by_label(plans: Sequence[Plan]) -> dict[str, dict[str | int, list[Plan]]]:
    """Label -> value -> plans, of labels with several values."""
    found: dict[str, dict[str | int, list[Plan]]] = {}
    for name in sorted({name for plan in plans for name in plan.row["labels"]}):
        has = [(plan.row["labels"][name], plan) for plan in plans if name in plan.row["labels"]]
        groups: dict[str | int, list[Plan]] = {}
        for value, plan in sorted(has, key=lambda each: (isinstance(each[0], str), each[0])):
            groups.setdefault(value, []).append(plan)
        if len(groups) > 1:
            found[name] = groups
    return found


def _numbers(plans: Sequence[Plan]) -> Row:
    return {"plans": len(plans), "sources": len({plan.source for plan in plans})}


def _mean_fact(plans: Sequence[Plan], name: str) -> float | None:
    return _mean([plan.row[name] for plan in plans if plan.row.get(name) is not None])


def _mean(found: Sequence[float] | Floats) -> float | None:
    return float(np.mean(found)) if len(found) else None
