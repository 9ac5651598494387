"""The changelog has the version that the package says it is."""

import re
from pathlib import Path

import kvshare

TITLES = re.findall(r"^## (.+)$", (Path(__file__).parents[1] / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_changes_that_come_next_stand_first() -> None:
    """They have no version yet."""
    assert TITLES[0] == "Unreleased"


def test_the_latest_dated_version_is_the_package() -> None:
    """`## 1.2.3 - 2026-11-23`, with the version of kvshare/__init__.py."""
    assert re.fullmatch(rf"{re.escape(kvshare.__version__)} - \d{{4}}-\d\d-\d\d", TITLES[1])
