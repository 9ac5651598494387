"""`results.json` and `requests.parquet` -> what the report shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvshare.errors import LogError
from kvshare.replay.results import (
    REQUESTS_FILE,
    RESULTS_FILE,
    SCHEMA_VERSION,
    ArmResults,
    Document,
    Figures,
    Results,
    finite,
)

_MAX_POINTS: Final = 1500  # of a scatter plot: more only make the file large
_POOR, _MIN_PART = 0.01, 0.03  # a gain below, by a group with at least that part of the tokens, is told

Point = tuple[float, float]


class Report(Results):
    """Everything the page shows. `points`: (distance, overlap) of single requests."""

    points: tuple[Point, ...] = ()

    @property
    def endless(self) -> tuple[ArmResults, ...]:
        """The arms with an infinite store."""
        return tuple(arm for arm in self.arms if arm.capacity_tokens is None)

    @property
    def keeping(self) -> tuple[ArmResults, ...]:
        """Those of them that keep anything."""
        return tuple(arm for arm in self.endless if arm.family != "nothing")

    @property
    def kvshare(self) -> ArmResults | None:
        """KVShare as it would be served: not with its gates open, if there is another."""
        found = [arm for arm in self.endless if arm.family == "kvshare"]
        found.sort(key=lambda arm: (arm.arm != "kvshare", "-open" in arm.arm.split(":")[0]))
        return found[0] if found else None

    def find(self, family: str) -> ArmResults | None:
        """The first arm of a family, with an infinite store."""
        return next((arm for arm in self.endless if arm.family == family), None)

    def groups(self, by: str) -> dict[str, Figures]:
        """Of KVShare, or else of the first arm: length buckets by length, words by the alphabet."""
        first = self.kvshare or next(iter(self.keeping), None)
        return dict(sorted(first.by.get(by, {}).items(), key=_natural)) if first else {}

    def poor_groups(self, *names: str) -> list[tuple[str, str, float, float]]:
        """Where KVShare brings next to nothing over prefix caching: name, key, gain, part of all tokens."""
        kvshare, prefix = self.kvshare, self.find("prefix")
        if kvshare is None:
            return []
        return [
            (name, key, gained, part)
            for name in names
            for key, figures in kvshare.by.get(name, {}).items()
            if (gained := gain(figures, prefix.by.get(name, {}).get(key) if prefix else None)) < _POOR
            and (part := figures.num_tokens / max(1, kvshare.num_tokens)) >= _MIN_PART
            and len(kvshare.by[name]) > 1
        ]


def gain(figures: Figures, base: Figures | None) -> float:
    """How many more of the tokens need no computing, as a difference of shares."""
    return (figures.token_hit_rate or 0.0) - ((base.token_hit_rate or 0.0) if base else 0.0)


def read_report(folder: Path) -> Report:
    """
    The files of a finished replay.

    Raises:  LogError if there is no `results.json` of this schema; `requests.parquet` may be missing
    """
    path = folder / RESULTS_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind != "replay" or document.get("schema_version") != SCHEMA_VERSION:
            raise LogError(f"{path.name} is no replay's of schema {SCHEMA_VERSION}")
        report = parse_report(document)
    except (OSError, ValueError) as exc:
        raise LogError(f"{path.name} cannot be read: {type(exc).__name__}") from exc
    return report.model_copy(update={"points": _points(folder / REQUESTS_FILE, report)})


def parse_report(document: Document) -> Report:
    """The same from a document in memory, without single requests."""
    report = Report.model_validate(document)
    if report.similarity is None or any(map(any, report.similarity.counts)):
        return report
    return report.model_copy(update={"similarity": None})  # nobody had an earlier prompt


def _points(path: Path, report: Report) -> tuple[Point, ...]:
    """Single requests, evenly picked from the stream: nearest distance, share of tokens in common."""
    meaning, similarity = report.find("response"), report.similarity
    if not path.is_file() or similarity is None or meaning is None:
        return ()
    arms = [meaning.arm, similarity.overlap]
    index, stride = pc.field("index"), max(1, -(-meaning.num_requests // _MAX_POINTS))
    picked = pc.field("arm").isin(arms) & pc.field("capacity_tokens").is_null()
    picked &= index / stride * stride == index  # of integers, so rounded down
    columns = ["index", "arm", "num_tokens", "num_hit", "distance"]
    rows = pq.read_table(path, columns=columns, filters=picked).to_pylist()
    near, shared = ({row["index"]: row for row in rows if row["arm"] == arm} for arm in arms)
    return tuple(
        (near[at]["distance"], shared[at]["num_hit"] / max(1, shared[at]["num_tokens"]))
        for at in near
        if at in shared and finite(near[at]["distance"]) is not None
    )


def _natural(group: tuple[str, Figures]) -> tuple[int, str]:
    number = group[0].split("-")[0]
    return (int(number) if number.isdecimal() else -1, group[0])
