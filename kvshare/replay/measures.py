"""Rows -> figures: what `results.json` says of each arm. A pure function of the rows, in one pass."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping

from kvshare.replay.histograms import Histogram, Series, Times
from kvshare.replay.results import (
    COUNT_EDGES,
    DISTANCE_EDGES,
    DISTANCE_THRESHOLDS,
    OVERLAP_EDGES,
    SHIFT_EDGES,
    Document,
    Row,
    arm_label,
    length_bucket,
)

_SHARES = (50, 70, 90)
_SUMMED = ("num_tokens", "num_hit", "num_repaired", "num_refused", "num_refused_generation", "embedded")
_ORIGINS = {True: "cross_user", False: "same_user", None: "unknown"}
_MAX_KEYS = 60  # of one grouping; a log with more languages than that has made them up


class Figures:
    """The figures of one arm over some of the requests."""

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._prefill = prefill_tokens_per_s
        self._sums: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        sums, num_tokens, num_hit = self._sums, row["num_tokens"], row["num_hit"]
        sums["requests"] += 1
        sums["tokens"] += num_tokens
        sums["hit"] += num_hit
        sums["exact"] += row["num_exact"]
        sums["repaired"] += row["num_repaired"]
        sums["with_hit"] += num_hit > 0
        for share in _SHARES:
            sums[f"with_{share}"] += num_hit > 0 and 100 * num_hit >= share * num_tokens
        sums["answered"] += row["answered"]
        sums["false"] += row["false_hit"]

    def document(self) -> Document:
        sums = self._sums
        requests, tokens = max(sums["requests"], 1), max(sums["tokens"], 1)
        saved_s = sums["hit"] / self._prefill
        return {
            "num_requests": sums["requests"],
            "num_tokens": sums["tokens"],
            "num_hit_tokens": sums["hit"],
            "num_exact_tokens": sums["exact"],
            "num_repaired_tokens": sums["repaired"],
            "token_hit_rate": sums["hit"] / tokens,
            "request_hit_rate": sums["with_hit"] / requests,
            **{f"request_hit_rate_{share}": sums[f"with_{share}"] / requests for share in _SHARES},
            "recomputed_fraction": 1 - sums["hit"] / tokens,
            "num_answered": sums["answered"],
            "num_false_hits": sums["false"],
            "false_hit_share": sums["false"] / sums["answered"] if sums["answered"] else 0.0,
            "ttft_saved_s": {
                "mean": saved_s / requests,
                "total": saved_s,
                "share": sums["hit"] / tokens,
            },
        }


class ArmMeasures:
    """Everything that is told of one arm with one store."""

    def __init__(self, *, prefill_tokens_per_s: float) -> None:
        self._prefill = prefill_tokens_per_s
        self._all = Figures(prefill_tokens_per_s)
        self._groups: dict[str, dict[str, Figures]] = {
            name: {} for name in ("language", "length", "turn", "origin")
        }
        self._coverage = [0] * 101
        self._copies, self._donors = Histogram(COUNT_EDGES), Histogram(COUNT_EDGES)
        self._shifts = Histogram(SHIFT_EDGES)
        self._reasons: Counter[str] = Counter()
        self._series = Series()
        self._bytes = {"final": 0, "peak": 0}
        self._lookup, self._plan, self._observe = Times(), Times(), Times()
        self.sums: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        num_tokens, num_hit = row["num_tokens"], row["num_hit"]
        self._all.add(row)
        for group, key in _keys(row).items():
            figures = self._groups[group]
            if key not in figures and len(figures) >= _MAX_KEYS:
                key = "other"
            figures.setdefault(key, Figures(self._prefill)).add(row)
        self._coverage[100 * num_hit // num_tokens if num_tokens else 0] += 1
        self._copies.add(row["num_copies"])
        self._donors.add(row["num_donors"])
        for shift in row["shifts"]:
            self._shifts.add(abs(shift))
        if row["reason"] is not None:
            self._reasons[row["reason"]] += 1
        num_bytes = row["num_stored_bytes"]
        self._series.add(row["index"], num_tokens=num_tokens, num_hit=num_hit, num_bytes=num_bytes)
        self._bytes = {"final": num_bytes, "peak": max(self._bytes["peak"], num_bytes)}
        for times, name in ((self._lookup, "lookup_s"), (self._plan, "plan_s"), (self._observe, "observe_s")):
            times.add(row[name])
        for name in _SUMMED:
            self.sums[name] += row[name]
        self.sums["num_requests"] += 1

    def document(self) -> Document:
        return {
            **self._all.document(),
            "coverage_histogram": self._coverage,
            "num_copies": self._copies.document(),
            "num_donors": self._donors.document(),
            "shift_tokens": self._shifts.document(),
            "reasons": dict(sorted(self._reasons.items())),
            "storage": {
                "final_bytes": self._bytes["final"],
                "peak_bytes": self._bytes["peak"],
                "bytes_per_request": self._bytes["final"] / max(1, self.sums["num_requests"]),
            },
            "series": self._series.document(),
            "by": {
                group: {key: figures.document() for key, figures in sorted(keys.items())}
                for group, keys in self._groups.items()
            },
        }

    def times(self, *, embedding_s: float = 0.0) -> Document:
        """What a clock had a part in. `embedding_s`: one text's, made ahead and so not in the look-up."""
        num_requests = max(1, self.sums["num_requests"])
        spent_s = self._lookup.total_s + self._plan.total_s + self.sums["embedded"] * embedding_s
        net_s = self.sums["num_hit"] / self._prefill - spent_s
        busy_s = self._observe.total_s
        return {
            "lookup_ms": self._lookup.milliseconds(),
            "plan_ms": self._plan.milliseconds(),
            "observe_ms": self._observe.milliseconds(),
            "requests_per_s": self.sums["num_requests"] / busy_s if busy_s else 0.0,
            "ttft_saved_net_s": {"mean": net_s / num_requests, "total": net_s},
        }


class Similarity:
    """How near in meaning the nearest earlier prompt is, against how many tokens could be shared."""

    def __init__(self, overlap: str) -> None:
        self._overlap = overlap
        self._counts = [[0] * len(OVERLAP_EDGES) for _ in DISTANCE_EDGES]
        self._within: Counter[float] = Counter()
        self._num_requests = 0

    def add(self, distance: float | None, overlap: float) -> None:
        """`distance` None: there was no earlier prompt."""
        self._num_requests += 1
        if distance is None:
            return
        row = bisect_right(DISTANCE_EDGES, distance) - 1
        self._counts[row][bisect_right(OVERLAP_EDGES, overlap) - 1] += 1
        for threshold in DISTANCE_THRESHOLDS:
            self._within[threshold] += distance <= threshold

    def document(self) -> Document:
        return {
            "distance_edges": list(DISTANCE_EDGES),
            "overlap_edges": list(OVERLAP_EDGES),
            "counts": self._counts,
            "overlap": self._overlap,
            "thresholds": [
                {"distance": threshold, "share": self._within[threshold] / max(1, self._num_requests)}
                for threshold in DISTANCE_THRESHOLDS
            ],
        }


class Measures:
    """All arms of a run. `families` tells each label's family; labels in the order of the results."""

    def __init__(self, families: Mapping[str, str], *, prefill_tokens_per_s: float) -> None:
        self._families = families
        self.arms = {label: ArmMeasures(prefill_tokens_per_s=prefill_tokens_per_s) for label in families}
        endless = [label for label in families if " @ " not in label]
        self._oracle = next((label for label in endless if families[label] == "oracle"), None)
        self._meaning = next((label for label in endless if families[label] == "response"), None)
        self._kvshare = [label for label in endless if families[label] == "kvshare"]
        self._overlap = self._oracle or next(iter(self._kvshare), None)
        self._similarity = Similarity(self._overlap or "")
        self._too_short: Counter[str] = Counter()  # what the oracle has of prompts that are not looked up

    def add(self, rows: Iterable[Row]) -> None:
        """The rows of one request, one an arm."""
        by_label = {arm_label(row["arm"], row["capacity_tokens"]): row for row in rows}
        for label, row in by_label.items():
            self.arms[label].add(row)
        if self._oracle is not None:
            num_covered = by_label[self._oracle]["num_hit"]
            for label in self._kvshare:
                self._too_short[label] += num_covered * (by_label[label]["reason"] == "short_prompt")
        if self._meaning is not None and self._overlap is not None:
            overlap = by_label[self._overlap]
            self._similarity.add(
                by_label[self._meaning]["distance"], overlap["num_hit"] / max(1, overlap["num_tokens"])
            )

    def similarity(self) -> Document | None:
        return None if self._meaning is None or self._overlap is None else self._similarity.document()

    def waterfalls(self) -> list[Document]:
        """Where what the oracle covers goes, for each kvshare arm."""
        if self._oracle is None:
            return []
        covered = self.arms[self._oracle].sums["num_hit"]
        found = []
        for label in self._kvshare:
            sums = self.arms[label].sums
            hit, repaired, refused = sums["num_hit"], sums["num_repaired"], sums["num_refused"]
            too_short, generation = self._too_short[label], sums["num_refused_generation"]
            losses = {
                "oracle": covered,
                "not_found": hit + repaired + refused + too_short - covered,
                "too_short": -too_short,
                "generation": -generation,
                "refused": generation - refused,
                "repaired": -repaired,
                "hit": hit,
            }
            steps = [{"name": name, "num_tokens": value} for name, value in losses.items()]
            found.append({"arm": label, "num_tokens": sums["num_tokens"], "steps": steps})
        return found


def _keys(row: Row) -> dict[str, str]:
    origin = "none" if not row["num_hit"] else _ORIGINS[row["cross_user"]]
    return {
        "language": row["language"],
        "length": length_bucket(row["num_tokens"]),
        "turn": "unknown" if row["turn"] is None else "later" if row["turn"] else "first",
        "origin": origin,
    }
