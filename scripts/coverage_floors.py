"""
Branch coverage by package, from the data of `make coverage`, and whether each package reaches its floor.

    .venv/bin/python scripts/coverage_floors.py     # `make coverage` calls it

Reads .coverage, stores docs/measured/coverage.json, prints a table, and ends with status 1 where a package is
below its floor in coverage_floors.yaml.
"""

import datetime
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import coverage
import yaml

from kvshare_lab.checkout import checkout_commit

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "measured" / "coverage.json"
FLOORS: dict[str, float] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def package_of(file: str, packages: Iterable[str] = FLOORS) -> str:
    """The innermost of the packages that the file lies in. Raises ValueError if there is none."""
    above = {str(parent) for parent in PurePath(file).parents}
    return max((package for package in packages if package in above), key=len)


def by_package(report: Mapping[str, Any]) -> dict[str, dict[str, int | float]]:
    """Branches, covered branches and their share for each package, from the report of `coverage json`."""
    counts = {package: {"branches": 0, "covered": 0} for package in FLOORS}
    for file, entry in report["files"].items():
        package = package_of(file)
        counts[package]["branches"] += entry["summary"]["num_branches"]
        counts[package]["covered"] += entry["summary"]["covered_branches"]
    return {
        package: {**count, "percent": round(100 * count["covered"] / max(count["branches"], 1), 1)}
        for package, count in counts.items()
    }


def below_floor(packages: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A sentence for each package below its floor."""
    return [
        f"{package}: {packages[package]['percent']} % of the branches are covered, the floor is {floor} %"
        for package, floor in FLOORS.items()
        if packages[package]["percent"] < floor
    ]


def main() -> None:
    data = coverage.Coverage()
    data.load()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        data.json_report(outfile=file.name)
        packages = by_package(json.load(file))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {"command": "make coverage", "date": date, "commit": checkout_commit()}
    DOCUMENT.write_text(json.dumps({**head, "packages": packages}, indent=1) + "\n", encoding="utf-8")
    for package, count in packages.items():
        sys.stdout.write(f"{package:24} {count['percent']:6} %   floor {FLOORS[package]:4} %\n")
    sys.exit("\n".join(below_floor(packages)) or None)


if __name__ == "__main__":
    main()
