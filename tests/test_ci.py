"""One list of checks: `make test`, and what calls its targets elsewhere."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def targets_of_test() -> list[str]:
    """What `make test` runs."""
    rule = re.search(r"^test: (.+)\n\t\$\(MAKE\) (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    return [name for name in rule[1].split() if not name.startswith("$")] + [rule[2]]


def test_ci_runs_make_test() -> None:
    """.ci/run installs programs and ends with it; two targets may run at a time."""
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make -j2 test"


def test_the_workflow_has_a_step_for_each_target() -> None:
    """In the same order, and nothing of its own; other systems and Pythons run the first of them."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }
    expected = [f"make {target}" for target in targets_of_test()]
    assert steps == {"test": expected, "core": expected[: expected.index("make core") + 1]}


def test_hooks_call_targets() -> None:
    """Before a commit and a push: those targets that take less than minutes."""
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {hook["entry"] for hook in local["hooks"]}
    assert entries <= {f"make {target}" for target in targets_of_test()}
    assert "make lint" in entries
