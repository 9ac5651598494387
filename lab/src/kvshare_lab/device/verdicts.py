"""
What a document of `kvshare bench device` says beside what was measured on the device, and the ratios that
decide whether sharing pays.

    python -m kvshare_lab.device.verdicts DOCUMENT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

_FAR_OFF = 0.25  # a figure that is further off is a miss
_FIRST_TOKEN = "first_token"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a table. `error`: relative, positive where the simulation takes or gives more."""

    table: str
    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def is_missed(self) -> bool:
        return abs(self.error) > _FAR_OFF

    def __str__(self) -> str:
        missed = "   missed" if self.is_missed else ""
        values = f"{self.measured:9.2f} {self.simulated:9.2f} {self.error:+7.1%}"
        return f"{self.table:15} {self.name:34} {values}{missed}"


def compared(document: Mapping[str, Any], profile: str) -> list[Figure]:
    """Every figure that was measured, and that the document has too."""
    path = resources.files(__package__) / "profiles" / f"{profile}-measured.yaml"
    if not path.is_file():
        return []  # a device of which some constants were not measured
    measured: Mapping[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    simulated = {(table, name): value for table, name, value in figures(document)}
    return [
        Figure(table, name, value, simulated[table, name])
        for table, name, value in _flat(measured)
        if (table, name) in simulated
    ]


def mean_error(figures: Iterable[Figure], table: str = _FIRST_TOKEN) -> float:
    """Mean of the absolute errors in a table."""
    return fmean(abs(figure.error) for figure in figures if figure.table == table)


def figures(document: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(table, name, value) of a simulation's document. Units: ms, and requests a second."""
    for row in document.get("first_token", ()):
        for arm in ("full", "prefix", "changed_10", "changed_1"):
            yield _FIRST_TOKEN, f"{row['tokens']} {arm}", 1e3 * row[arm]["ttft_s"]
        for stage, seconds in row["changed_10"]["stage_s"].items():
            yield "stages", f"{row['tokens']} {stage}", 1e3 * seconds
    for row in document.get("load", ()):
        of = f"{row['near_share']:g} {row['arm']}"
        yield "load", f"{of} requests_per_s", row["requests_per_s"]
        for kind, is_near in (("near", True), ("unrelated", False)):
            waits = [each["ttft_s"] for each in row["requests"] if each["is_near"] is is_near]
            if waits:
                yield "load", f"{of} {kind}_ttft_ms", 1e3 * float(np.median(waits))
        gaps = [gap for each in row["requests"] for gap in each["gaps_s"]]
        for share in (50, 99):
            yield "load", f"{of} gap_p{share}_ms", 1e3 * float(np.percentile(gaps, share))
    for row in document.get("between_tokens", ()):
        gaps = row["gaps_s"]
        worst = {"mean": fmean(gaps), "p99": float(np.percentile(gaps, 99)), "max": max(gaps)}
        for name, value in worst.items():
            yield "between_tokens", f"{row['arm']} {name}_ms", 1e3 * value


def _flat(measured: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for length, arms in measured["first_token_ms"].items():
        yield from ((_FIRST_TOKEN, f"{length} {arm}", value) for arm, value in arms.items())
    for length, stages in measured["stages_ms"].items():
        yield from (("stages", f"{length} {stage}", value) for stage, value in stages.items())
    for row in measured["load"]:
        of = f"{row['near_share']:g} {row['arm']}"
        names = row.keys() - {"near_share", "arm"}
        yield from (("load", f"{of} {name}", row[name]) for name in sorted(names))
    for arm, gaps in measured.get("between_tokens", {}).items():
        yield from (("between_tokens", f"{arm} {name}", value) for name, value in gaps.items())


def ratios(document: Mapping[str, Any]) -> dict[str, float]:
    """What sharing gains: stock vLLM's time to the first token over ours, our requests a second over its."""
    found = {
        f"first_token {row['tokens']} {arm}": row["full"]["ttft_s"] / row[arm]["ttft_s"]
        for row in document.get("first_token", ())
        for arm in ("changed_10", "changed_1")
    }
    rates = {(row["near_share"], row["arm"]): row["requests_per_s"] for row in document.get("load", ())}
    for share, arm in rates:
        if arm == "shared":
            found[f"load {share:g}"] = rates[share, arm] / rates[share, "plain"]
    return found | _in_the_way(document) | choosing_costs(document) | _from_disk(document)


def _in_the_way(document: Mapping[str, Any]) -> dict[str, float]:
    """The gaps between tokens next to loads over those next to prefix hits: 99th percentile and longest."""
    gaps = {row["arm"]: row["gaps_s"] for row in document.get("between_tokens", ())}
    if "prefix_hits" not in gaps:
        return {}
    loads, hits = gaps["loads"], gaps["prefix_hits"]
    return {
        "between_tokens p99": float(np.percentile(loads, 99) / np.percentile(hits, 99)),
        "between_tokens max": max(loads) / max(hits),
    }


def _from_disk(document: Mapping[str, Any]) -> dict[str, float]:
    """In full over with the donor on disk: the median of the requests, and the worst one."""
    found: dict[str, float] = {}
    for row in document.get("disk", ()):
        gains = [each["full"]["ttft_s"] / each["shared"]["ttft_s"] for each in row["requests"]]
        of = f"disk {row['gb_per_s']:g} GB/s {row['arm']}"
        found |= {of: float(np.median(gains)), f"{of}, worst": min(gains)}
    return found


def choosing_costs(document: Mapping[str, Any]) -> dict[str, float]:
    """What a choice costs: time with it over time without, and requests a second without it over with."""
    arms = {row["arm"]: row for row in document.get("choosing", ())}
    if not arms:
        return {}
    chosen, by_place = arms["chosen"], arms["by_place"]
    found = {
        f"choosing {ours['tokens']} {kind}": ours[kind]["ttft_s"] / other[kind]["ttft_s"]
        for ours, other in zip(chosen["first_token"], by_place["first_token"], strict=True)
        for kind in ("edited", "reordered")
    }
    return found | {"choosing load": by_place["load"]["requests_per_s"] / chosen["load"]["requests_per_s"]}


def verdicts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Figure by figure, how far off the simulation is, and what sharing gains."""
    found = compared(document, document["profile"])
    return {
        "benchmark": "device",
        "profile": document["profile"],
        "commit": document.get("commit"),
        "first_token_mean_error": mean_error(found) if found and "first_token" in document else None,
        "missed": [f"{figure.table} {figure.name}" for figure in found if figure.is_missed],
        "measured": {f"{figure.table} {figure.name}": figure.measured for figure in found},
        "simulated": {f"{figure.table} {figure.name}": round(figure.simulated, 2) for figure in found},
        "ratios": {name: round(ratio, 2) for name, ratio in ratios(document).items()},
    }


def main(arguments: Sequence[str]) -> None:
    """A line a figure; with --json a document."""
    document = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    found = verdicts(document)
    if "--json" in arguments:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    figures = compared(document, document["profile"])
    sys.stdout.write("".join(f"{figure}\n" for figure in figures))
    sys.stdout.write(f"{len(figures)} figures, {len(found['missed'])} missed by more than {_FAR_OFF:.0%}\n")
    if (error := found["first_token_mean_error"]) is not None:
        sys.stdout.write(f"time to first token: off by {error:.1%} in the mean\n")
    sys.stdout.write("".join(f"{name:40} {ratio:6.2f}\n" for name, ratio in found["ratios"].items()))


if __name__ == "__main__":
    main(sys.argv[1:])
