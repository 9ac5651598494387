"""Compares one rule with the others at equal budget, with p corrected for the number of tests; its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import exp
from typing import Any, Final

from kvshare.bench.fidelity.rows import Plan, Row, Setting, by_suite, count_unable, pairs, setting_of, values
from kvshare.bench.fidelity.statistics import difference_p, holm, mean, mean_log_ratio, ratio

_SIGNIFICANT: Final = 0.05  # of the adjusted p

Bound = Mapping[str, Any]
"""
Keys: suite, rule, and `upper` for the upper end of the interval or `at` for a value that the interval must
contain. Optional: budget (0), by ("b"), measure ("kl"), against: the rule to which the ratio is taken, and
labels: only plans that have all of these.
"""


def comparisons(plans: Sequence[Plan], ours: str, published: Sequence[str]) -> list[Row]:
    """One for each setting of our rule with a budget, for repairs or charged."""
    own = {setting for plan in plans for setting in plan.arms if setting.rule == ours and setting.budget > 0}
    return [_compared(plans, setting, published) for setting in sorted(own)]


def check_bounds(plans: Sequence[Plan], bounds: Sequence[Bound]) -> list[Row]:
    """Each bound with the measured value and by how much it is missed; `reached` None: not measured."""
    suites = by_suite(plans)
    return [{**bound, **_checked(_labelled(suites, bound), bound)} for bound in bounds]


def _labelled(suites: Mapping[str, Sequence[Plan]], bound: Bound) -> Sequence[Plan]:
    wanted = bound.get("labels", {}).items()
    return [plan for plan in suites.get(bound["suite"], []) if wanted <= plan.row.get("labels", {}).items()]


def _compared(plans: Sequence[Plan], ours: Setting, published: Sequence[str]) -> Row:
    others = [ours._replace(rule=rule) for rule in published if rule != ours.rule]
    suites = {suite: own for suite, own in by_suite(plans).items() if any(ours in plan.arms for plan in own)}
    single = [_in_suite(suite, own, ours, other) for suite, own in suites.items() for other in others]
    over = [row for other in others if (row := _over_suites([*suites.values()], ours, other))]
    for family in (single, over):
        _correct(family)
    return {"ours": ours.rule, "by": ours.by, "budget": ours.budget, "suites": single, "over_suites": over}


def _in_suite(suite: str, plans: Sequence[Plan], ours: Setting, other: Setting) -> Row:
    both = pairs(plans, ours, other)
    unable = {"cannot": count_unable(plans, other) or None, "ours_cannot": count_unable(plans, ours) or None}
    row = {"suite": suite, "rule": other.rule, "plans": len(both), "sources": len({*both.sources}), **unable}
    if both:
        return {**row, "ratio": asdict(ratio(both)), "p": difference_p(both)}
    fixed = setting_of(plans, other.rule, other.by, other.budget)
    if fixed and (both := pairs(plans, ours, fixed)):  # a rule without budgets
        known = {"plans": len(both), "sources": len({*both.sources}), "ratio": asdict(ratio(both))}
        return {**row, **known, "p": None, "verdict": "not at equal b"}
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
        row |= {"p_holm": adjusted, "verdict": verdict if is_significant else "not told apart"}


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
