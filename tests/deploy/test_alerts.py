"""
Prometheus' alert rules and Grafana's board use metrics, labels and values that docs/reference.md has.

That the reference has those of the registry, and no others, is tested in tests/proxy.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.containers import DEPLOY, ROOT, compose

GROUPS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
SCRAPES = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
BOARD = json.loads((DEPLOY / "grafana" / "kvshare.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
SELECTOR = re.compile(r"\b((?:kvshare|process)_\w+)(?:\{([^}]*)\})?")
OF_SCRAPES = {"job", "instance"}
"""Labels that Prometheus adds to every metric."""


def reference_labels() -> dict[str, tuple[str, str]]:
    """Metric -> the names of its labels, and the cell that lists them with their values."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").split("\n## Metrics\n")[1]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|([^|]*)\|([^|]*)\|", text, re.MULTILINE)
    found = {}
    for names, cell, measures in rows:
        labels = " ".join(re.findall(r"`(\w+)`", cell))
        for name in re.findall(r"\w+", names):
            found[name] = (labels, cell)
            if measures.strip().startswith("histogram"):
                found[f"{name}_bucket"] = (f"{labels} le", cell)
    return found


def matchers(selector: str) -> Iterator[tuple[str, str]]:
    """Label and value of each `label="value"`."""
    return ((found[1], found[2]) for found in re.finditer(r'(\w+)\s*(?:=~|!=|=)\s*"([^"]*)"', selector))


def check(query: str, shown: str) -> None:
    """Fail if a query has a metric, label or value that does not exist, or shows a label that it has not."""
    labels = reference_labels()
    selectors = SELECTOR.findall(query)
    assert selectors
    for metric, selector in selectors:
        assert metric in labels, f"{metric}: no such metric"
        for label, value in matchers(selector):
            if label in OF_SCRAPES:
                continue
            assert label in labels[metric][0].split(), f"{metric} has no label {label}"
            if label in ("component", "planned", "executed", "state"):
                assert f"`{value}`" in labels[metric][1], f"{metric}: {label} is never {value}"
    known = {label for metric, _ in selectors for label in labels[metric][0].split()}
    grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
    assert grouped <= known, f"{query}: {grouped - known}"
    assert set(re.findall(r"\w+", shown)) <= known | OF_SCRAPES, f"{query}: shows {shown}"
    if grouped:
        assert set(re.findall(r"\w+", shown)) <= grouped, f"{query}: {shown} is summed up"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_rules_use_metrics_that_exist(rule: dict[str, Any]) -> None:
    """Each metric and label of an expression, and each label of a summary, is in the reference."""
    check(rule["expr"], " ".join(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_use_metrics_that_exist(panel: dict[str, Any]) -> None:
    """Each metric and label of a query, and each label of a legend, is in the reference."""
    assert [target["refId"] for target in panel["targets"]] == list("ABCDE")[: len(panel["targets"])]
    for target in panel["targets"]:
        check(target["expr"], " ".join(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])))


def test_rules_have_what_prometheus_wants() -> None:
    """Names are unique, and every rule has a severity, a summary and a runbook."""
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 5
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert set(rule["annotations"]) == {"summary", "runbook"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """The annotation names the alert's own section of docs/deploying.md."""
    text = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8").split("\n## Runbooks\n")[1]
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/deploying.md#{rule['alert'].lower()}"


def test_prometheus_scrapes_what_compose_starts() -> None:
    """Targets are services with their ports; rules name a job that there is; the rules are mounted."""
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in SCRAPES["scrape_configs"]}
    assert jobs == {"kvshare": ["kvshare:8081"], "vllm": ["vllm:8000"]}
    settings = yaml.safe_load((DEPLOY / "settings.yaml").read_text(encoding="utf-8"))
    assert settings["server"]["admin_port"] == 8081
    services = compose()["services"]
    assert set(jobs) <= set(services)
    used = {value for rule in RULES for label, value in matchers(rule["expr"]) if label == "job"}
    assert used == {"kvshare"}
    mounted = dict(each.split(":")[1::-1] for each in services["prometheus"]["volumes"] if each[0] == ".")
    assert SCRAPES["rule_files"] == ["alerts.yaml"]
    for inside, outside in mounted.items():
        assert (DEPLOY / outside).is_file(), inside
    assert {"/etc/prometheus/prometheus.yml", "/etc/prometheus/alerts.yaml"} == set(mounted)


def test_the_board_is_in_the_order_of_a_request() -> None:
    """Rows count up; panels do not overlap and have numbers of their own."""
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert [int(title.split(".")[0]) for title in rows] == list(range(1, len(rows) + 1))
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    cells = [
        (x, y)
        for each in places
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert [(each["y"], each["x"]) for each in places] == sorted((each["y"], each["x"]) for each in places)


def test_the_board_is_provisioned() -> None:
    """Grafana of compose.yaml finds the board, and a source of data of its kind."""
    volumes = compose()["services"]["grafana"]["volumes"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvshare.yaml").read_text())["providers"]
    assert f"./grafana/kvshare.json:{provider['options']['path']}/kvshare.json:ro" in volumes
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (variable,) = BOARD["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    assert {panel["datasource"]["uid"] for panel in PANELS} == {f"${{{variable['name']}}}"}


def test_an_unknown_metric_is_found() -> None:
    """The checks above reject a metric, a label and a legend that do not exist."""
    assert "kvshare_requests_total" in reference_labels()
    assert "kvshare_requests" not in reference_labels()
    assert dict(matchers('status=~"5..", reason="x"')) == {"status": "5..", "reason": "x"}
    for query, shown in (
        ("kvshare_requests", ""),
        ('kvshare_requests_total{reason="x"}', ""),
        ("sum by (reason) (kvshare_requests_total)", ""),
        ("sum by (status) (kvshare_requests_total)", "endpoint"),
        ('kvshare_circuit_state{state="shut"}', ""),
    ):
        with pytest.raises(AssertionError):
            check(query, shown)
