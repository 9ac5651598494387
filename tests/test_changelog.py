"""The changelog has the version that the package says it is."""

import re
from pathlib import Path

import kvshare

ROOT = Path(__file__).parents[1]
TITLES = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_latest_dated_version_is_the_package() -> None:
    """`## 1.2.3 - 2026-11-23`, with the version of kvshare/__init__.py; the next ones may stand before it."""
    dated = [title for title in TITLES if title != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(kvshare.__version__)} - \d{{4}}-\d\d-\d\d", dated[0])
    assert TITLES in (dated, ["Unreleased", *dated])


def test_the_lab_is_of_the_same_version() -> None:
    """They are released together."""
    source = (ROOT / "lab" / "src" / "kvshare_lab" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{kvshare.__version__}"' in source
