"""examples/alerts.yaml is a file of Prometheus rules over metrics and labels that docs/reference.md has."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
GROUPS = yaml.safe_load((ROOT / "examples" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
SELECTOR = re.compile(r"\b((?:kvshare|process)_\w+)(?:\{([^}]*)\})?")


def reference_labels() -> dict[str, tuple[str, str]]:
    """Metric -> the names of its labels, and the cell that lists them with their values."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").split("\n## Metrics\n")[1]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|([^|]*)\|", text, re.MULTILINE)
    return {
        name: (" ".join(re.findall(r"`(\w+)`", cell)), cell)
        for names, cell in rows
        for name in re.findall(r"\w+", names)
    }


def matchers(selector: str) -> Iterator[tuple[str, str]]:
    """Label and value of each `label="value"`."""
    return ((found[1], found[2]) for found in re.finditer(r'(\w+)\s*(?:=~|!=|=)\s*"([^"]*)"', selector))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_rules_use_metrics_that_exist(rule: dict[str, Any]) -> None:
    """Each metric and label of an expression, and each label of a summary, is in the reference."""
    labels = reference_labels()
    selectors = SELECTOR.findall(rule["expr"])
    assert selectors
    for metric, selector in selectors:
        assert metric in labels, f"{metric}: no such metric"
        for label, value in matchers(selector):
            if label == "job":  # the scrape's own
                continue
            assert label in labels[metric][0].split(), f"{metric} has no label {label}"
            if label in ("component", "planned", "executed", "state"):
                assert f"`{value}`" in labels[metric][1], f"{metric}: {label} is never {value}"
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert any(label in labels[metric][0].split() for metric, _ in selectors)


def test_rules_have_what_prometheus_wants() -> None:
    """Names are unique, and every rule has a severity and a summary."""
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 5
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))


def test_an_unknown_metric_is_found() -> None:
    """The checks above reject a metric that does not exist."""
    assert "kvshare_requests_total" in reference_labels()
    assert "kvshare_requests" not in reference_labels()
    assert dict(matchers('status=~"5..", reason="x"')) == {"status": "5..", "reason": "x"}
