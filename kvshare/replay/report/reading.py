"""`results.json` and `requests.parquet` -> what the report shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvshare.errors import LogError
from kvshare.replay.results import (
    REQUESTS_FILE,
    RESULTS_FILE,
    SCHEMA_VERSION,
    ArmResults,
    Document,
    Results,
    finite,
)

_MAX_POINTS: Final = 1500  # of a scatter plot: more only make the file large

Point = tuple[float, float]


class Report(Results):
    """Everything the page shows. `points`: (distance, overlap) of single requests."""

    points: tuple[Point, ...] = ()

    @property
    def endless(self) -> tuple[ArmResults, ...]:
        """The arms with an infinite store."""
        return tuple(arm for arm in self.arms if arm.capacity_tokens is None)

    @property
    def kvshare(self) -> ArmResults | None:
        """KVShare as it would be served: not with its gates open, if there is another."""
        found = [arm for arm in self.endless if arm.family == "kvshare"]
        found.sort(key=lambda arm: (arm.arm != "kvshare", "-open" in arm.arm.split(":")[0]))
        return found[0] if found else None

    def find(self, family: str) -> ArmResults | None:
        """The first arm of a family, with an infinite store."""
        return next((arm for arm in self.endless if arm.family == family), None)


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
    stride = max(1, -(-meaning.num_requests // _MAX_POINTS))
    distances: dict[int, float] = {}
    overlaps: dict[int, float] = {}
    wanted = pa.array([meaning.arm, similarity.overlap])
    names = ["index", "arm", "capacity_tokens", "num_tokens", "num_hit", "distance"]
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=65_536, columns=names):
            chosen = pc.and_(pc.is_in(batch["arm"], value_set=wanted), pc.is_null(batch["capacity_tokens"]))
            for row in batch.filter(chosen).to_pylist():
                if row["index"] % stride:
                    continue
                if row["arm"] == meaning.arm and (distance := finite(row["distance"])) is not None:
                    distances[row["index"]] = distance
                if row["arm"] == similarity.overlap:
                    overlaps[row["index"]] = row["num_hit"] / max(1, row["num_tokens"])
    return tuple((distances[index], overlaps[index]) for index in sorted(distances) if index in overlaps)
