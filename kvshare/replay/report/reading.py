"""`results.json` and `requests.parquet` -> what report and terminal show."""

from pathlib import Path
from typing import Final

import numpy as np

from kvshare.replay.results import REQUESTS_FILE, Document, Figures, PolicyResults, Results
from kvshare.replay.rows import read_policy
from kvshare.replay.whole_files import cannot_be_read, read_results

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
        names = {policy.arm for policy in self.main}
        return tuple(policy for policy in self.infinite if policy.arm not in names)

    @property
    def finite(self) -> dict[int, Policies]:
        capacities = sorted({policy.capacity_tokens for policy in self.arms if policy.capacity_tokens})
        return {at: tuple(each for each in self.arms if each.capacity_tokens == at) for at in capacities}

    def find(self, family: str) -> PolicyResults | None:
        return next((policy for policy in self.infinite if policy.family == family), None)

    def loses_nothing(self, capacity: int) -> bool:
        reused = {policy.arm: policy.num_hit_tokens for policy in self.infinite}
        return all(reused.get(one.arm) == one.num_hit_tokens for one in self.finite[capacity])

    def groups(self, by: str) -> dict[str, Figures]:
        """The groups of KVShare, or else of the first policy that caches; lengths in order, words sorted."""
        caching = (policy for policy in self.infinite if policy.family != "nothing")
        first = self.kvshare or next(caching, None)
        return dict(sorted(first.by.get(by, {}).items(), key=_natural)) if first else {}

    def poor_groups(self, *names: str) -> list[tuple[str, str, float, float]]:
        """Groups where KVShare adds little to a prefix cache: name, key, gain, part of all tokens."""
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
    """Return how many more of the tokens are not computed, as a difference of shares."""
    return (figures.token_hit_rate or 0.0) - ((base.token_hit_rate or 0.0) if base else 0.0)


def read_report(folder: Path) -> Report:
    """
    Return the files of a finished replay.

    Raises:  LogError if there is no `results.json` of this schema; `requests.parquet` may be missing
    """
    try:
        report = parse_report(read_results(folder))
    except ValueError as exc:
        raise cannot_be_read(folder, exc) from exc
    return report.model_copy(update={"points": _points(folder / REQUESTS_FILE, report)})


def parse_report(document: Document) -> Report:
    """Return the same from a document in memory, without single requests."""
    report = Report.model_validate(document)
    if report.similarity is None or any(map(any, report.similarity.counts)):
        return report
    return report.model_copy(update={"similarity": None})  # no request had an earlier prompt


def _points(path: Path, report: Report) -> tuple[Point, ...]:
    """Single requests, evenly picked from the stream: nearest distance, share of equal tokens."""
    response, similarity = report.find("response"), report.similarity
    if not path.is_file() or similarity is None or response is None:
        return ()
    distances = read_policy(path, response.arm, columns=["index", "distance"])["distance"].to_numpy()
    rows = read_policy(path, similarity.overlap, columns=["index", "num_tokens", "num_hit"])
    overlaps = rows["num_hit"].to_numpy() / np.maximum(rows["num_tokens"].to_numpy(), 1)
    picked = np.arange(len(rows)) % max(1, -(-len(rows) // _MAX_POINTS)) == 0
    picked &= np.isfinite(distances)
    return tuple(zip(distances[picked].tolist(), overlaps[picked].tolist(), strict=True))


def _natural(group: tuple[str, Figures]) -> tuple[int, str]:
    number = group[0].split("-")[0]
    return (int(number) if number.isdecimal() else -1, group[0])
