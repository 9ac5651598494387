"""Branch coverage by package, and the floors that the last `make coverage` reached."""

import json

import pytest

from coverage_floors import DOCUMENT, FLOORS, ROOT, below_floor, by_package, package_of

CORE = ("delta_tree", "kvshare/kv", "kvshare/sharing", "kvshare/vllm_connector")


def test_every_package_reaches_its_floor() -> None:
    """In the document that the last `make coverage` stored."""
    packages = json.loads(DOCUMENT.read_text(encoding="utf-8"))["packages"]
    assert packages.keys() == FLOORS.keys()
    assert below_floor(packages) == [], "run: make coverage"


def test_every_package_has_a_floor() -> None:
    """A new folder of kvshare/ needs a line in coverage_floors.yaml; core and connector are at 90 %."""
    folders = {f"kvshare/{path.parent.name}" for path in (ROOT / "kvshare").glob("*/__init__.py")}
    assert (
        folders | {"kvshare", "delta_tree", "proxy", "vector_index", "lab/src/kvshare_lab"} == FLOORS.keys()
    )
    assert min(FLOORS[package] for package in CORE) >= 90


def test_files_count_for_the_innermost_package() -> None:
    """Modules of kvshare/ itself are a package of their own."""
    assert package_of("kvshare/sharing/plan.py") == "kvshare/sharing"
    assert package_of("kvshare/errors.py") == "kvshare"
    assert package_of("lab/src/kvshare_lab/bench/burst.py") == "lab/src/kvshare_lab"
    with pytest.raises(ValueError, match="empty"):
        package_of("tests/conftest.py")


def test_branches_are_summed_by_package() -> None:
    """Files without branches change nothing; a package below its floor is named with both figures."""
    counts = {
        "kvshare/sharing/plan.py": (10, 9),
        "kvshare/sharing/cost.py": (10, 4),
        "kvshare/errors.py": (0, 0),
    }
    report = {
        "files": {
            file: {"summary": {"num_branches": branches, "covered_branches": covered}}
            for file, (branches, covered) in counts.items()
        }
    }
    packages = by_package(report)
    assert packages["kvshare/sharing"] == {"branches": 20, "covered": 13, "percent": 65.0}
    (finding,) = [line for line in below_floor(packages) if line.startswith("kvshare/sharing:")]
    assert finding.endswith(f"65.0 % of the branches are covered, the floor is {FLOORS['kvshare/sharing']} %")
