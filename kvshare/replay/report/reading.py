"""`results.json` and `requests.parquet` -> what report and terminal show."""

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
    Document,
    Figures,
    PolicyResults,
    Results,
    finite,
)

_NUM_MAIN: Final = 4
_MAX_POINTS: Final = 1500  # of a scatter plot: more only make the file large
_POOR, _MIN_PART = 0.01, 0.03  # gains below are reported, of groups with at least that part of the tokens

Point = tuple[float, float]
Policies = tuple[PolicyResults, ...]


class Report(Results):
    """The results, and what is chosen from them. `points`: (distance, overlap) of single requests."""

    points: tuple[Point, ...] = ()

    @property
    def infinite(self) -> Policies:
        """The policies with an infinite store."""
        return tuple(policy for policy in self.arms if policy.capacity_tokens is None)

    @property
    def kvshare(self) -> PolicyResults | None:
        """KVShare as it would be served: with its thresholds, if it was replayed with them."""
        found = [policy for policy in self.infinite if policy.family == "kvshare"]
        found.sort(key=lambda policy: (policy.arm != "kvshare", "-open" in policy.arm.split(":")[0]))
        return found[0] if found else None

    @property
    def main(self) -> Policies:
        """The four policies to show first: prefix, chunks, KVShare and oracle, or others in their place."""
        first = (self.find("prefix"), self.find("chunks"), self.kvshare, self.find("oracle"))
        order = {policy.arm: -1 for policy in first if policy}
        ranked = sorted(self.infinite, key=lambda policy: order.get(policy.arm, policy.family == "nothing"))
        chosen = {policy.arm for policy in ranked[:_NUM_MAIN]}
        return tuple(policy for policy in self.infinite if policy.arm in chosen)

    @property
    def others(self) -> Policies:
        """The policies with an infinite store that are not among the main ones."""
        names = {policy.arm for policy in self.main}
        return tuple(policy for policy in self.infinite if policy.arm not in names)

    @property
    def finite(self) -> dict[int, Policies]:
        """By capacity in tokens: the policies with such a store."""
        capacities = sorted({policy.capacity_tokens for policy in self.arms if policy.capacity_tokens})
        return {at: tuple(each for each in self.arms if each.capacity_tokens == at) for at in capacities}

    def find(self, family: str) -> PolicyResults | None:
        """The first policy of a family, with an infinite store."""
        return next((policy for policy in self.infinite if policy.family == family), None)

    def loses_nothing(self, capacity: int) -> bool:
        """Whether each policy reuses as much with this store as with an infinite one."""
        reused = {policy.arm: policy.num_hit_tokens for policy in self.infinite}
        return all(reused.get(one.arm) == one.num_hit_tokens for one in self.finite[capacity])

    def groups(self, by: str) -> dict[str, Figures]:
        """Of KVShare, or else of the first policy that caches: lengths in order, words by the alphabet."""
        caching = (policy for policy in self.infinite if policy.family != "nothing")
        first = self.kvshare or next(caching, None)
        return dict(sorted(first.by.get(by, {}).items(), key=_natural)) if first else {}

    def poor_groups(self, *names: str) -> list[tuple[str, str, float, float]]:
        """Where KVShare adds next to nothing to a prefix cache: name, key, gain, part of all tokens."""
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
    """How many more of the tokens are not computed, as a difference of shares."""
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
            raise LogError(f"{path.name} is not a replay's of schema {SCHEMA_VERSION}")
        report = parse_report(document)
    except (OSError, ValueError) as exc:
        raise LogError(f"{path.name} cannot be read: {type(exc).__name__}") from exc
    return report.model_copy(update={"points": _points(folder / REQUESTS_FILE, report)})


def parse_report(document: Document) -> Report:
    """The same from a document in memory, without single requests."""
    report = Report.model_validate(document)
    if report.similarity is None or any(map(any, report.similarity.counts)):
        return report
    return report.model_copy(update={"similarity": None})  # no request had an earlier prompt


def _points(path: Path, report: Report) -> tuple[Point, ...]:
    """Single requests, evenly picked from the stream: nearest distance, share of equal tokens."""
    response, similarity = report.find("response"), report.similarity
    if not path.is_file() or similarity is None or response is None:
        return ()
    names = [response.arm, similarity.overlap]
    index, stride = pc.field("index"), max(1, -(-response.num_requests // _MAX_POINTS))
    picked = pc.field("arm").isin(names) & pc.field("capacity_tokens").is_null()
    picked &= index / stride * stride == index  # of integers, so rounded down
    columns = ["index", "arm", "num_tokens", "num_hit", "distance"]
    rows = pq.read_table(path, columns=columns, filters=picked).to_pylist()
    near, shared = ({row["index"]: row for row in rows if row["arm"] == name} for name in names)
    return tuple(
        (near[at]["distance"], shared[at]["num_hit"] / max(1, shared[at]["num_tokens"]))
        for at in near
        if at in shared and finite(near[at]["distance"]) is not None
    )


def _natural(group: tuple[str, Figures]) -> tuple[int, str]:
    number = group[0].split("-")[0]
    return (int(number) if number.isdecimal() else -1, group[0])
