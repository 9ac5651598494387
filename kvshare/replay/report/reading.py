"""
`results.json` and `requests.parquet` -> `Report`. The one place that knows most of the schema's keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvshare.errors import LogError
from kvshare.replay.report.data import (
    SHARES,
    ArmReport,
    Figures,
    Histogram,
    Report,
    Similarity,
    Stretch,
    Tree,
    Waterfall,
)
from kvshare.replay.results import REQUESTS_FILE, RESULTS_FILE, SCHEMA_VERSION, Document, arm_label

_MAX_POINTS: Final = 1500  # of a scatter plot: more only make the file large


def read_report(folder: Path) -> Report:
    """
    The files of a finished replay.

    Raises:  LogError if there is no `results.json` of this schema; `requests.parquet` may be missing
    """
    path = folder / RESULTS_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError) as exc:
        raise LogError(f"{path.name} cannot be read: {type(exc).__name__}") from exc
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind != "replay" or document.get("schema_version") != SCHEMA_VERSION:
        raise LogError(f"{path.name} is no replay's of schema {SCHEMA_VERSION}")
    return parse_report(document, folder / REQUESTS_FILE)


def parse_report(document: Document, requests: Path | None = None) -> Report:
    """The same from a document in memory."""
    times = _mapping(document, "times")
    clocks = _mapping(times, "arms")
    arms = tuple(_arm(one, _mapping(clocks, one.get("label", ""))) for one in document.get("arms") or ())
    similarity = _similarity(document.get("similarity"))
    return Report(
        arms=arms,
        similarity=similarity,
        waterfalls=tuple(_waterfall(one) for one in document.get("waterfall") or ()),
        points=_points(requests, arms, similarity),
        config=_mapping(document, "config"),
        data=_mapping(document, "data"),
        versions=_mapping(document, "versions"),
        times=times,
    )


def number(document: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or None."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def count(document: Mapping[str, Any], key: str) -> int:
    """A count; what is not there is 0."""
    return int(number(document, key) or 0)


def _mapping(document: Mapping[str, Any], key: str) -> Document:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _arm(one: Document, clock: Document) -> ArmReport:
    capacity, storage, tree = number(one, "capacity_tokens"), _mapping(one, "storage"), _mapping(one, "tree")
    name = str(one.get("arm", "?"))
    tokens = None if capacity is None else int(capacity)
    sizes = [number(storage, key) for key in ("final_bytes", "peak_bytes")]
    return ArmReport(
        arm=name,
        label=str(one.get("label", arm_label(name, tokens))),
        family=str(one.get("family", name.split(":")[0])),
        capacity_tokens=tokens,
        figures=_figures(one),
        coverage=tuple(int(n) for n in one.get("coverage_histogram") or ()),
        series=tuple(Stretch(*(int(n) for n in row[:5])) for row in one.get("series") or ()),
        by={
            group: {key: _figures(figures) for key, figures in keys.items()}
            for group, keys in _mapping(one, "by").items()
        },
        final_bytes=None if sizes[0] is None else int(sizes[0]),
        peak_bytes=None if sizes[1] is None else int(sizes[1]),
        reasons={key: int(n) for key, n in _mapping(one, "reasons").items()},
        num_copies=_histogram(_mapping(one, "num_copies")),
        num_donors=_histogram(_mapping(one, "num_donors")),
        shifts=_histogram(_mapping(one, "shift_tokens")),
        tree=_tree(tree) if tree else None,
        times_ms={
            name: {key: number(_mapping(clock, f"{name}_ms"), key) for key in ("p50", "p90", "p99", "max")}
            for name in ("lookup", "plan", "observe")
        },
        saved_net_mean_s=number(_mapping(clock, "ttft_saved_net_s"), "mean"),
    )


def _figures(one: Document) -> Figures:
    saved = _mapping(one, "ttft_saved_s")
    return Figures(
        num_requests=count(one, "num_requests"),
        num_tokens=count(one, "num_tokens"),
        num_hit_tokens=count(one, "num_hit_tokens"),
        num_exact_tokens=count(one, "num_exact_tokens"),
        num_repaired_tokens=count(one, "num_repaired_tokens"),
        token_hit_rate=number(one, "token_hit_rate"),
        request_hit_rate=number(one, "request_hit_rate"),
        at_least=tuple(number(one, f"request_hit_rate_{share}") for share in SHARES),
        recomputed=number(one, "recomputed_fraction"),
        saved_mean_s=number(saved, "mean"),
        saved_total_s=number(saved, "total"),
        num_answered=count(one, "num_answered"),
        num_false_hits=count(one, "num_false_hits"),
    )


def _histogram(one: Document) -> Histogram:
    edges, counts = one.get("edges") or (), one.get("counts") or ()
    return Histogram(tuple(edges), tuple(int(n) for n in counts), number(one, "mean"), number(one, "max"))


def _tree(one: Document) -> Tree:
    numbers = {key: count(one, key) for key in sorted(one) if key.startswith("num_")}
    return Tree(_histogram(_mapping(one, "depth")), _histogram(_mapping(one, "children")), numbers)


def _similarity(one: Any) -> Similarity | None:
    if not isinstance(one, dict) or not any(map(any, one.get("counts") or ())):
        return None
    return Similarity(
        distance_edges=tuple(one["distance_edges"]),
        overlap_edges=tuple(one["overlap_edges"]),
        counts=tuple(tuple(int(n) for n in row) for row in one["counts"]),
        overlap=str(one.get("overlap", "")),
        thresholds=tuple(
            (float(t["distance"]), share)
            for t in one.get("thresholds") or ()
            if (share := number(t, "share")) is not None
        ),
    )


def _waterfall(one: Document) -> Waterfall:
    steps = tuple((str(step["name"]), int(step["num_tokens"])) for step in one.get("steps") or ())
    return Waterfall(str(one.get("arm", "?")), count(one, "num_tokens"), steps)


def _points(
    path: Path | None, arms: Sequence[ArmReport], similarity: Similarity | None
) -> tuple[tuple[float, float], ...]:
    """Single requests, evenly picked from the stream: nearest distance, share of tokens in common."""
    meaning = next((arm for arm in arms if arm.family == "response" and arm.capacity_tokens is None), None)
    if path is None or not path.is_file() or similarity is None or meaning is None:
        return ()
    stride = max(1, -(-meaning.figures.num_requests // _MAX_POINTS))
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
                if row["arm"] == meaning.arm and (distance := number(row, "distance")) is not None:
                    distances[row["index"]] = distance
                if row["arm"] == similarity.overlap:
                    overlaps[row["index"]] = row["num_hit"] / max(1, row["num_tokens"])
    return tuple((distances[index], overlaps[index]) for index in sorted(distances) if index in overlaps)
