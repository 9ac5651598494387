"""Rows -> figures: what `results.json` says of each arm. A pure function of the rows, in one pass."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping

from kvshare.replay import results as schema
from kvshare.replay.counts import (
    COUNT_EDGES,
    DISTANCE_EDGES,
    DISTANCE_THRESHOLDS,
    OVERLAP_EDGES,
    SHIFT_EDGES,
    Buckets,
    Series,
    Times,
    key_within,
    length_bucket,
)
from kvshare.replay.results import SHARES, Row, arm_label

_SUMMED = ("num_tokens", "num_hit", "num_repaired", "num_refused", "num_refused_generation", "embedded")
_ORIGINS = {True: "cross_user", False: "same_user", None: "unknown"}


class FigureSums:
    """The figures of one arm over some of the requests, as sums."""

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
        for share in SHARES:
            sums[f"with_{share}"] += num_hit > 0 and 100 * num_hit >= share * num_tokens
        sums["answered"] += row["answered"]
        sums["false"] += row["false_hit"]

    def figures(self) -> schema.Figures:
        sums = self._sums
        requests, tokens = max(sums["requests"], 1), max(sums["tokens"], 1)
        rate, saved_s = sums["hit"] / tokens, sums["hit"] / self._prefill
        return schema.Figures(
            num_requests=sums["requests"],
            num_tokens=sums["tokens"],
            num_hit_tokens=sums["hit"],
            num_exact_tokens=sums["exact"],
            num_repaired_tokens=sums["repaired"],
            token_hit_rate=rate,
            request_hit_rate=sums["with_hit"] / requests,
            request_hit_rate_50=sums["with_50"] / requests,
            request_hit_rate_70=sums["with_70"] / requests,
            request_hit_rate_90=sums["with_90"] / requests,
            recomputed_fraction=1 - rate,
            num_answered=sums["answered"],
            num_false_hits=sums["false"],
            false_hit_share=sums["false"] / sums["answered"] if sums["answered"] else 0.0,
            ttft_saved_s=schema.Saved(mean=saved_s / requests, total=saved_s, share=rate),
        )


class ArmMeasures:
    """One arm with one store, measured row by row."""

    def __init__(self, *, prefill_tokens_per_s: float) -> None:
        self._prefill = prefill_tokens_per_s
        self._all = FigureSums(prefill_tokens_per_s)
        self._groups: dict[str, dict[str, FigureSums]] = {
            name: {} for name in ("language", "length", "turn", "origin")
        }
        self._coverage = [0] * 101
        self._copies, self._donors = Buckets(COUNT_EDGES), Buckets(COUNT_EDGES)
        self._shifts = Buckets(SHIFT_EDGES)
        self._reasons: Counter[str] = Counter()
        self._series = Series()
        self._final_bytes = self._peak_bytes = 0
        self._clocks = {name: Times() for name in ("lookup_s", "plan_s", "observe_s")}
        self.sums: Counter[str] = Counter()  # of the rows' columns

    def add(self, row: Row) -> None:
        num_tokens, num_hit, num_bytes = row["num_tokens"], row["num_hit"], row["num_stored_bytes"]
        self._all.add(row)
        for group, key in _keys(row).items():
            sums = self._groups[group]
            sums.setdefault(key_within(sums, key), FigureSums(self._prefill)).add(row)
        self._coverage[100 * num_hit // num_tokens if num_tokens else 0] += 1
        self._copies.add(row["num_copies"])
        self._donors.add(row["num_donors"])
        for shift in row["shifts"]:
            self._shifts.add(abs(shift))
        if row["reason"] is not None:
            self._reasons[row["reason"]] += 1
        self._series.add(row["index"], num_tokens=num_tokens, num_hit=num_hit, num_bytes=num_bytes)
        self._final_bytes, self._peak_bytes = num_bytes, max(self._peak_bytes, num_bytes)
        for name, times in self._clocks.items():
            times.add(row[name])
        for name in _SUMMED:
            self.sums[name] += row[name]
        self.sums["num_requests"] += 1

    def results(self, store: schema.Store, tree: schema.Tree | None = None) -> schema.ArmResults:
        return schema.ArmResults(
            **dict(store),
            **dict(self._all.figures()),
            coverage_histogram=tuple(self._coverage),
            num_copies=self._copies.histogram(),
            num_donors=self._donors.histogram(),
            shift_tokens=self._shifts.histogram(),
            reasons=dict(sorted(self._reasons.items())),
            storage=schema.Storage(
                final_bytes=self._final_bytes,
                peak_bytes=self._peak_bytes,
                bytes_per_request=self._final_bytes / max(1, self.sums["num_requests"]),
            ),
            series=tuple(self._series.stretches),
            by={
                group: {key: one.figures() for key, one in sorted(sums.items())}
                for group, sums in self._groups.items()
            },
            tree=tree,
        )

    def times(self, *, embedding_s: float = 0.0) -> schema.ArmTimes:
        """What a clock had a part in. `embedding_s`: one text's, made ahead and so not in the look-up."""
        num_requests = self.sums["num_requests"]
        lookup, plan, observe = self._clocks.values()
        spent_s = lookup.total_s + plan.total_s + self.sums["embedded"] * embedding_s
        net_s = self.sums["num_hit"] / self._prefill - spent_s
        return schema.ArmTimes(
            lookup_ms=lookup.milliseconds(),
            plan_ms=plan.milliseconds(),
            observe_ms=observe.milliseconds(),
            requests_per_s=num_requests / observe.total_s if observe.total_s else 0.0,
            ttft_saved_net_s=schema.NetSaved(mean=net_s / max(1, num_requests), total=net_s),
        )


class Likeness:
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

    def similarity(self) -> schema.Similarity:
        num_requests = max(1, self._num_requests)
        return schema.Similarity(
            distance_edges=DISTANCE_EDGES,
            overlap_edges=OVERLAP_EDGES,
            counts=tuple(map(tuple, self._counts)),
            overlap=self._overlap,
            thresholds=tuple(
                schema.Threshold(distance=threshold, share=self._within[threshold] / num_requests)
                for threshold in DISTANCE_THRESHOLDS
            ),
        )


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
        self._likeness = Likeness(self._overlap or "")
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
            self._likeness.add(
                by_label[self._meaning]["distance"], overlap["num_hit"] / max(1, overlap["num_tokens"])
            )

    def similarity(self) -> schema.Similarity | None:
        return None if self._meaning is None or self._overlap is None else self._likeness.similarity()

    def waterfalls(self) -> tuple[schema.Waterfall, ...]:
        """Where what the oracle covers goes, for each kvshare arm."""
        return () if self._oracle is None else tuple(map(self._waterfall, self._kvshare))

    def _waterfall(self, label: str) -> schema.Waterfall:
        sums, covered = self.arms[label].sums, self.arms[self._oracle or ""].sums["num_hit"]
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
        steps = tuple(schema.Step(name=name, num_tokens=value) for name, value in losses.items())
        return schema.Waterfall(arm=label, num_tokens=sums["num_tokens"], steps=steps)


def _keys(row: Row) -> dict[str, str]:
    origin = "none" if not row["num_hit"] else _ORIGINS[row["cross_user"]]
    return {
        "language": row["language"],
        "length": length_bucket(row["num_tokens"]),
        "turn": "unknown" if row["turn"] is None else "later" if row["turn"] else "first",
        "origin": origin,
    }
