"""The lab's report on made rows: what is merged, what is compared, and what the files show."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from kvshare.errors import LogError
from kvshare_lab.fidelity.report import markdown, report, write
from kvshare_lab.fidelity.rows import Row, Setting, pairs, read_plans, setting_of
from kvshare_lab.fidelity.tables import comparisons

FACTORS = {"epic": 3.0, "cacheblend": 1.0, "query": 1.5, "edit-windows": 0.9}


def arm(rule: str, kl: float, budget: float = 0.1, by: str = "b", **more: object) -> Row:
    """One arm of a row."""
    measured = {"b": budget, "charged": budget + 0.05, "kl_first": kl / 2, "top1": 0.95, "runs": 9}
    return {"rule": rule, "budget": budget, "by": by, "kl": kl, **measured, **more}


def row(number: int, arms: Sequence[Row], suite: str = "rag", **more: object) -> Row:
    """One line of a file."""
    known = {"suite": suite, "half": 0, "number": number, "source": f"question:{number // 2}"}
    numbers = {"tokens": 800, "exact": 40, "copied": 610, "computed": 150, "pieces": 7, "moved": 0.6}
    return {**known, "labels": {"hops": 1 + number % 2}, "model": "small", **numbers, "arms": arms, **more}


def unable(rule: str) -> Row:
    """An arm whose selection costs more than a tenth."""
    return {"rule": rule, "budget": 0.1, "by": "charged", "cannot": True}


def made_rows(suite: str, base: float, seed: int) -> list[Row]:
    """40 plans: EPIC is three times as bad as ours, CacheBlend the same but for noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, kl in enumerate(base * np.exp(0.5 * rng.normal(size=40))):
        arms = [
            arm("placeholders", 4 * kl, 0.0),
            arm("kvshare", kl, margin=1.5, rank=1),
            unable("cacheblend"),
        ]
        arms += [arm(rule, kl * factor * np.exp(0.4 * rng.normal())) for rule, factor in FACTORS.items()]
        arms += [arm("kvshare", kl, by="charged"), arm("epic", kl, by="charged")]
        arms += [arm("full", 0.0, 0.0, margin=2.0, rank=1, free={"agree": 1.0, "equal": 1})]
        noise = {"chunked": {"kl": 1e-9, "kl_first": 1e-9, "top1": 1.0}}
        rows.append(row(number, arms, suite, noise=noise, moved=0.0 if suite == "template" else 0.7))
    return rows


def saved(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """As a file of lines."""
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Row:
    """The report of two suites."""
    folder = tmp_path_factory.mktemp("rows")
    saved(folder, "shard-1.jsonl", made_rows("template", 0.01, 1))
    saved(folder, "shard-2.jsonl", made_rows("rag", 0.05, 2))
    bounds = [
        {"suite": "rag", "rule": "kvshare", "budget": 0.1, "against": "placeholders", "upper": 0.5},
        {"suite": "rag", "rule": "kvshare", "budget": 0.1, "against": "placeholders", "upper": 0.2},
        {"suite": "rag", "rule": "kvshare", "budget": 0.2, "against": "placeholders", "upper": 0.36},
        {"suite": "rag", "rule": "full", "upper": 1e-6},
        {"suite": "judge", "rule": "kvshare", "budget": 0.1, "against": "placeholders", "upper": 0.5},
        {"suite": "rag", "rule": "placeholders", "at": 0.1},
        {"suite": "rag", "rule": "placeholders", "measure": "top1", "at": 0.123},
        {"suite": "rag", "rule": "full", "upper": 1e-6, "labels": {"hops": 2}},
    ]
    return report(folder, bounds=bounds)


def the(rows: Sequence[Row], **wanted: object) -> Row:
    """The only row with these values."""
    (found,) = [one for one in rows if wanted.items() <= one.items()]
    return found


def test_arms_of_several_files_are_merged_and_the_last_of_one_holds(tmp_path: Path) -> None:
    """Files in the order of their names; what only the earlier line says stays."""
    saved(tmp_path, "1.jsonl", [row(3, [arm("epic", 0.1), arm("random", 0.2)], noise={"chunked": {"kl": 0}})])
    saved(tmp_path, "2.jsonl", [row(3, [arm("epic", 0.3), arm("epic", 0.4, by="charged")])])
    (plan,) = read_plans(tmp_path)
    kl = {(one.rule, one.by): measured["kl"] for one, measured in plan.arms.items()}
    assert kl == {("epic", "b"): 0.3, ("random", "b"): 0.2, ("epic", "charged"): 0.4}
    assert plan.row["noise"] == {"chunked": {"kl": 0}}


def test_an_arm_has_the_measures_of_all_its_lines(tmp_path: Path) -> None:
    """One stage wrote answers, another did not."""
    saved(tmp_path, "answers.jsonl", [row(0, [arm("kvshare", 0.2, margin=1.5, free={"agree": 0.5})])])
    saved(tmp_path, "result.jsonl", [row(0, [arm("kvshare", 0.1)])])
    (plan,) = read_plans(tmp_path)
    found = plan.arms[Setting("kvshare", "b", 0.1)]
    assert (found["kl"], found["margin"], found["free_agree"]) == (0.1, 1.5, 0.5)


def test_an_unfinished_last_line_is_skipped_and_any_other_refused(tmp_path: Path) -> None:
    """A killed run leaves the first; the second would be lost without a word."""
    line = json.dumps(row(0, [arm("epic", 0.1)]))
    (tmp_path / "1.jsonl").write_text(f"{line}\n{line[:50]}", encoding="utf-8")
    assert len(read_plans(tmp_path)) == 1
    for bad in (line[:50], '{"suite": "rag"}', "[]"):
        (tmp_path / "1.jsonl").write_text(f"{bad}\n{line}\n", encoding="utf-8")
        with pytest.raises(LogError, match=r"1\.jsonl:1"):
            read_plans(tmp_path)


def test_a_measure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """It would make every mean it is in unknown."""
    saved(tmp_path, "1.jsonl", [row(0, [arm("epic", float("nan"))])])
    with pytest.raises(LogError, match="NaN"):
        read_plans(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("half", 1), ("model", "large")])
def test_halves_and_models_are_not_mixed(tmp_path: Path, name: str, value: Any) -> None:
    """One is chosen, or it is an error."""
    saved(tmp_path, "1.jsonl", [row(0, [arm("epic", 0.1)]), row(0, [arm("epic", 0.2)], **{name: value})])
    with pytest.raises(LogError, match=name):
        read_plans(tmp_path)
    (plan,) = read_plans(tmp_path, **{name: value})
    assert plan.arms[Setting("epic", "b", 0.1)]["kl"] == 0.2


def test_two_scenarios_of_one_number_are_not_one_plan(tmp_path: Path) -> None:
    """Their arms are no pairs."""
    saved(tmp_path, "1.jsonl", [row(0, [arm("epic", 0.1)]), row(0, [arm("random", 0.1)], tokens=3)])
    with pytest.raises(LogError, match="tokens"):
        read_plans(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    """Not an empty report."""
    with pytest.raises(LogError):
        read_plans(tmp_path)


def test_pairs_are_of_the_plans_that_both_rules_have(tmp_path: Path) -> None:
    """Plan 1 lacks one of them, on plan 2 one cannot run."""
    rows = [row(0, [arm("epic", 0.1, by="charged"), arm("kvshare", 0.2, by="charged")])]
    rows += [row(1, [arm("epic", 0.3, by="charged")])]
    rows += [row(2, [unable("epic"), arm("kvshare", 0.4, by="charged")])]
    saved(tmp_path, "1.jsonl", rows)
    both = pairs(read_plans(tmp_path), Setting("kvshare", "charged", 0.1), Setting("epic", "charged", 0.1))
    assert (both.sources, list(both.ours), list(both.theirs)) == (["question:0"], [0.2], [0.1])


def test_only_a_rule_without_budgets_stands_in_for_another_budget(tmp_path: Path) -> None:
    """Placeholders are the same at any; EPIC at 20 % is not EPIC at 10 %."""
    saved(tmp_path, "1.jsonl", [row(0, [arm("placeholders", 0.1, 0.0), arm("epic", 0.1, 0.2)])])
    plans = read_plans(tmp_path)
    assert setting_of(plans, "placeholders", "b", 0.1) == Setting("placeholders", "b", 0.0)
    assert setting_of(plans, "epic", "b", 0.1) is None
    assert setting_of(plans, "random", "b", 0.1) is None


def test_results_hold_what_was_measured(tmp_path: Path) -> None:
    """Computed by hand: of .01, .02 and .12 one is above .05, the median is the middle one."""
    found = [(0.01, 0.04), (0.02, 0.08), (0.12, 0.18)]
    rows = [
        row(2 * i, [arm("epic", kl), arm("placeholders", base, 0.0)]) for i, (kl, base) in enumerate(found)
    ]
    saved(tmp_path, "1.jsonl", rows)
    result = the(report(tmp_path)["results"], rule="epic")
    assert (result["plans"], result["sources"], result["median"]) == (3, 3, 0.02)
    assert result["kl"]["value"] == pytest.approx(0.05)
    assert result["above"]["value"] == pytest.approx(1 / 3)
    assert result["ratio"]["value"] == pytest.approx(0.15 / 0.30)
    assert result["ratio"]["low"] < 0.5 < result["ratio"]["high"]
    assert (result["top1"], result["charged"], result["runs"]) == pytest.approx((0.95, 0.15, 9))


def test_the_comparison_finds_the_worse_rule_and_not_the_equal_one(document: Row) -> None:
    """In each suite, and over both."""
    found = the(document["comparisons"], by="b", budget=0.1)
    verdicts = {(one["suite"], one["rule"]): one["verdict"] for one in found["suites"]}
    for suite in ("rag", "template"):
        assert verdicts[suite, "epic"] == "better"
        assert verdicts[suite, "cacheblend"] == "no significant difference"
        assert verdicts[suite, "random"] == "not run"
    over = {one["rule"]: one for one in found["over_suites"]}
    assert (over["epic"]["verdict"], over["cacheblend"]["verdict"]) == ("better", "no significant difference")
    assert over["epic"]["ratio"]["value"] == pytest.approx(1 / 3, rel=0.2)


def test_holms_family_is_all_rules_and_suites(document: Row) -> None:
    """Four rules in two suites: the smallest of the eight p is multiplied by eight."""
    rows = [one for one in the(document["comparisons"], by="b")["suites"] if one["p"] is not None]
    least = min(rows, key=lambda one: one["p"])
    assert len(rows) == 8
    assert least["p_holm"] == pytest.approx(8 * least["p"])


def test_a_worse_rule_of_ours_is_called_so(tmp_path: Path) -> None:
    """The direction is ours against theirs."""
    saved(tmp_path, "1.jsonl", made_rows("rag", 0.05, 3))
    found = comparisons(read_plans(tmp_path), "epic", ["kvshare"])
    assert the(the(found, by="b")["suites"], rule="kvshare")["verdict"] == "worse"


def test_a_rule_beyond_the_charged_budget_cannot_run(document: Row) -> None:
    """It has no p and does not count in Holm's family."""
    found = the(document["comparisons"], by="charged")
    rows = [one for one in found["suites"] if one["rule"] == "cacheblend"]
    assert [(one["verdict"], one["p"], one["cannot"]) for one in rows] == [("cannot run", None, 40)] * 2
    assert the(document["results"], suite="rag", rule="cacheblend", by="charged")["cannot"] == 40


def test_bounds_are_on_the_upper_end_of_the_interval(document: Row) -> None:
    """A quarter on each plan is within .5 and misses .2 by .05; what was not run is neither."""
    reached, missed, not_run, full, no_suite, *_ = document["bounds"]
    assert (reached["reached"], reached["missed_by"], reached["plans"]) == (True, None, 40)
    assert missed["reached"] is False
    assert missed["missed_by"] == pytest.approx(0.05)
    assert (not_run["reached"], no_suite["reached"], not_run["plans"]) == (None, None, 0)
    assert full["reached"] is True


def test_a_value_is_reached_where_the_interval_holds_it(document: Row) -> None:
    """Every arm has a top-1 of .95; the mean KL of placeholders on `rag` is four times .05, not .1."""
    kl, top1, two_hops = document["bounds"][5:]
    assert (two_hops["reached"], two_hops["plans"]) == (True, 20)
    assert (kl["reached"], top1["reached"]) == (False, False)
    assert kl["missed_by"] == pytest.approx(kl["found"]["low"] - 0.1)
    assert top1["missed_by"] == pytest.approx(0.95 - 0.123)
    assert (top1["found"]["low"], top1["found"]["high"]) == (pytest.approx(0.95), pytest.approx(0.95))


def test_labels_noise_answers_and_regimes(document: Row) -> None:
    """Odd plans have two hops; the margin is half a nat below full prefill's; windows win by .6."""
    one, two = (the(document["labels"], suite="rag", value=hops, rule="epic") for hops in (1, 2))
    assert (one["plans"], two["plans"], two["label"]) == (20, 20, "hops")
    assert the(document["noise"], suite="rag")["kl"]["value"] == pytest.approx(1e-9)
    answer = the(document["answers"], suite="rag", rule="kvshare")
    assert (answer["margin"], answer["margin_to_full"]["value"], answer["rank"]) == (1.5, -0.5, 1.0)
    assert the(document["answers"], suite="rag", rule="full")["free_agree"] == 1.0
    assert the(document["regimes"], suite="rag")["ratio"]["value"] == pytest.approx(1.5 / 0.9, rel=0.2)


def test_the_files_are_complete_and_show_titles(document: Row, tmp_path: Path) -> None:
    """JSON without NaN, Markdown with "after EPIC", and figures that name the rules."""
    out = tmp_path / "report"
    write(document, out)
    text = (out / "report.md").read_text(encoding="utf-8")
    read = json.loads((out / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert read == document
    assert "after EPIC" in text
    assert "| epic |" not in text
    for name in ("kl-by-b", "kl-by-charged", "regimes"):
        assert f"![{name}]({name}.png)" in text
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(out / f"{name}.svg")
    assert "after EPIC (chunk heads)</text>" in (out / "kl-by-b.svg").read_text(encoding="utf-8")


def test_every_row_of_a_markdown_table_has_the_heads_columns(document: Row) -> None:
    """Whatever is left out."""
    for block in markdown(document).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count(" | ") for line in block.splitlines()}) == 1, block


def test_little_data_makes_a_report_too(tmp_path: Path) -> None:
    """One plan with one arm: no interval, no comparison, no regimes."""
    saved(tmp_path, "1.jsonl", [row(0, [arm("kvshare", 0.1)])])
    document = report(tmp_path)
    write(document, tmp_path / "out")
    assert document["results"][0]["kl"] == {"value": 0.1, "low": None, "high": None}
    assert not (tmp_path / "out" / "regimes.svg").exists()
