"""
The tables of the report as rows of plain data: every rule at every budget in every suite.

One rule is compared with the others at equal budget, with p corrected for the number of tests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from math import exp
from typing import Any, Final

import numpy as np

from kvshare_lab.fidelity.rows import Plan, Row, Setting, by_suite, count_unable, pairs, setting_of, values
from kvshare_lab.fidelity.statistics import Floats, difference_p, holm, mean, mean_log_ratio, ratio, wilson

BASELINE: Final = "placeholders"
FULL: Final = "full"
_NOTABLE: Final = 0.05  # nats: beside every mean is the share of plans above it
_FACTS: Final = ("tokens", "exact", "copied", "computed", "pieces", "moved")
_MEANS: Final = ("top1", "kl_first", "b", "charged", "runs")
_SIGNIFICANT: Final = 0.05  # of the adjusted p

Bound = Mapping[str, Any]
"""
Keys: suite, rule, and `upper` for the upper end of the interval or `at` for a value that the interval must
contain. Optional: budget (0), by ("b"), measure ("kl"), against: the rule to which the ratio is taken, and
labels: only plans that have all of these.
"""


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
        measures = [[plan.measure(setting, name) for name in ("margin", "rank", "free")] for plan in own]
        if chosen := [plan for plan, found in zip(own, measures, strict=True) if found != [None] * 3]:
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


def _by_label(plans: Sequence[Plan]) -> dict[str, dict[str | int, list[Plan]]]:
    """Label -> value -> plans, of labels with several values."""
    found: dict[str, dict[str | int, list[Plan]]] = {}
    for name in sorted({name for plan in plans for name in plan.row["labels"]}):
        has = [(plan.row["labels"][name], plan) for plan in plans if name in plan.row["labels"]]
        has.sort(key=lambda each: (isinstance(each[0], str), each[0]))
        groups = {value: [plan for _, plan in own] for value, own in groupby(has, key=lambda each: each[0])}
        if len(groups) > 1:
            found[name] = groups
    return found


def _numbers(plans: Sequence[Plan]) -> Row:
    return {"plans": len(plans), "sources": len({plan.source for plan in plans})}


def _mean_fact(plans: Sequence[Plan], name: str) -> float | None:
    return _mean([plan.row[name] for plan in plans if plan.row.get(name) is not None])


def _mean(found: Sequence[float] | Floats) -> float | None:
    return float(np.mean(found)) if len(found) else None


def comparisons(plans: Sequence[Plan], ours: str, published: Sequence[str]) -> list[Row]:
    """One for each setting of our rule with a budget, for repairs or charged."""
    own = {setting for plan in plans for setting in plan.arms if setting.rule == ours and setting.budget > 0}
    return [_compared(plans, setting, published) for setting in sorted(own)]


def check_bounds(plans: Sequence[Plan], bounds: Sequence[Bound]) -> list[Row]:
    """Each bound with the measured value and by how much it is missed; `reached` None: not measured."""
    rows = []
    for bound in bounds:
        own = [plan for plan in plans if plan.suite == bound["suite"]]
        wanted = bound.get("labels", {}).items()
        own = [plan for plan in own if wanted <= plan.row.get("labels", {}).items()]
        rows.append({**bound, **_checked(own, bound)})
    return rows


def _compared(plans: Sequence[Plan], ours: Setting, published: Sequence[str]) -> Row:
    others = [ours._replace(rule=rule) for rule in published if rule != ours.rule]
    suites = {suite: own for suite, own in by_suite(plans).items() if any(ours in plan.arms for plan in own)}
    single = [_in_suite(suite, own, ours, other) for suite, own in suites.items() for other in others]
    over = [row for other in others if (row := _over_suites([*suites.values()], ours, other))]
    for family in (single, over):
        _correct(family)
    return {"ours": ours.rule, "by": ours.by, "budget": ours.budget, "suites": single, "over_suites": over}


def _in_suite(suite: str, plans: Sequence[Plan], ours: Setting, other: Setting) -> Row:
    both, fixed = pairs(plans, ours, other), setting_of(plans, other.rule, other.by, other.budget)
    is_tested = len(both) > 0
    if fixed and not is_tested:  # a rule without budgets
        both = pairs(plans, ours, fixed)
    unable = {"cannot": count_unable(plans, other) or None, "ours_cannot": count_unable(plans, ours) or None}
    row = {"suite": suite, "rule": other.rule, "plans": len(both), "sources": len({*both.sources}), **unable}
    if is_tested:
        return {**row, "ratio": asdict(ratio(both)), "p": difference_p(both)}
    if both:
        return {**row, "ratio": asdict(ratio(both)), "p": None, "verdict": "not at equal b"}
    verdict = "cannot run" if unable["cannot"] else "ours cannot run" if unable["ours_cannot"] else "not run"
    return {**row, "ratio": None, "p": None, "verdict": verdict}


def _over_suites(suites: Sequence[Sequence[Plan]], ours: Setting, other: Setting) -> Row | None:
    both = [run for plans in suites if (run := pairs(plans, ours, other))]
    if not both:
        return None
    mean_log, p = mean_log_ratio(both)
    logs = asdict(mean_log)
    ratios = {name: None if log is None else exp(log) for name, log in logs.items()}
    return {"rule": other.rule, "suites": len(both), "log_ratio": logs, "ratio": ratios, "p": p}


def _correct(family: Sequence[Row]) -> None:
    """Adds Holm's p and the verdict to rows that have a p."""
    tested = [row for row in family if row["p"] is not None]
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
        is_significant = adjusted < _SIGNIFICANT and row["ratio"]["value"] != 1  # 1: both below the floor
        verdict = "better" if row["ratio"]["value"] < 1 else "worse"
        row |= {"p_holm": adjusted, "verdict": verdict if is_significant else "no significant difference"}


def _checked(plans: Sequence[Plan], bound: Bound) -> Row:
    by, budget, measure = bound.get("by", "b"), bound.get("budget", 0.0), bound.get("measure", "kl")
    ours = setting_of(plans, bound["rule"], by, budget)
    found, number = None, 0
    if ours and "against" in bound:
        other = setting_of(plans, bound["against"], by, budget)
        if both := pairs(plans, ours, other, measure) if other else None:
            found, number = ratio(both), len(both)
    elif ours:
        own, sources = values(plans, ours, measure)
        found, number = (mean(own, sources), len(own)) if len(own) else (None, 0)
    if found is None or found.low is None or found.high is None:
        return {"plans": number, "found": found and asdict(found), "reached": None, "missed_by": None}
    if "at" in bound:
        missed = max(0.0, found.low - bound["at"], bound["at"] - found.high)
    else:
        missed = max(0.0, found.high - bound["upper"])
    return {"plans": number, "found": asdict(found), "reached": missed == 0, "missed_by": missed or None}
