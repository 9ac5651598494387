"""
Rows -> figures: what `results.json` says of the log and of each policy. Pure functions of tables with the
schema of rows.py, each with the rows of one policy in the stream's order.

At the end, what they count with: histograms, percentiles and series of many values.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from kvshare.logs.unreadable import Unreadable
from kvshare.replay import results as schema
from kvshare.replay.results import SHARES

LENGTH_EDGES: Final = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
COUNT_EDGES: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
SHIFT_EDGES: Final = (0, 1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # absolute
DISTANCE_EDGES: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
OVERLAP_EDGES: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DISTANCE_THRESHOLDS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
# The keys under `by.length`: "512-1023", and "32768-" for the last.
LENGTH_BUCKETS: Final = (*(f"{a}-{b - 1}" for a, b in pairwise(LENGTH_EDGES)), f"{LENGTH_EDGES[-1]}-")

_ORIGINS = ("same_user", "cross_user", "unknown")
_MAX_LANGUAGES = 60  # a log with more has other words in this field
_CLOCKS = ("lookup_s", "plan_s", "observe_s")
SUMMED = (
    *("num_tokens", "num_hit", "num_exact", "num_repaired", "num_refused", "num_refused_generation"),
    *("answered", "false_hit", "embedded"),
)
_MAX_STRETCHES = 200

Sums = Mapping[str, Any]
RowsOf = Callable[[str], pa.Table]  # a policy's, with an infinite store


def each_request(rows: pa.Table) -> pa.Table:
    """
    Return what each request adds to the sums of the figures: `SUMMED`, "requests", and "with_50" if at least
    that share of its tokens, and at least one, is reused.
    """
    tokens, hit = _tokens_and_hits(rows)
    table = rows.select(SUMMED).append_column("requests", pa.array(np.ones(len(rows), np.int64)))
    for share in (0, *SHARES):
        table = table.append_column(f"with_{share}", pa.array((hit > 0) & (100 * hit >= share * tokens)))
    return table


def grouped(requests: pa.Table, keys: pa.Array | pa.ChunkedArray) -> dict[Any, Sums]:
    """Sum up the requests of each key, in the order in which the keys first come."""
    names = requests.column_names
    table = requests.append_column("key", keys).group_by("key", use_threads=False)
    summed = table.aggregate([(name, "sum") for name in names]).rename_columns(["key", *names])
    return {row.pop("key"): row for row in summed.to_pylist()}


def _totals(each: pa.Table) -> Sums:
    return {name: pc.sum(each[name]).as_py() or 0 for name in each.column_names}


def _figures(sums: Sums, prefill_tokens_per_s: float) -> schema.Figures:
    requests, tokens = max(sums["requests"], 1), max(sums["num_tokens"], 1)
    rate, saved_s = sums["num_hit"] / tokens, sums["num_hit"] / prefill_tokens_per_s
    return schema.Figures(
        num_requests=sums["requests"],
        num_tokens=sums["num_tokens"],
        num_hit_tokens=sums["num_hit"],
        num_exact_tokens=sums["num_exact"],
        num_repaired_tokens=sums["num_repaired"],
        token_hit_rate=rate,
        request_hit_rate=sums["with_0"] / requests,
        **{f"request_hit_rate_{share}": sums[f"with_{share}"] / requests for share in SHARES},
        recomputed_fraction=1 - rate,
        num_answered=sums["answered"],
        num_false_hits=sums["false_hit"],
        false_hit_share=sums["false_hit"] / max(sums["answered"], 1),
        ttft_saved_s=schema.Saved(mean=saved_s / requests, total=saved_s, share=rate),
    )


def _languages(rows: pa.Table) -> pa.ChunkedArray:
    """Return the first `_MAX_LANGUAGES` of them; later ones are "other"."""
    languages = rows["language"]
    return pc.if_else(pc.is_in(languages, languages.unique()[:_MAX_LANGUAGES]), languages, "other")


def _keys(rows: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Return each request's key in each grouping of `by`."""
    lengths = np.array(LENGTH_BUCKETS)[buckets(LENGTH_EDGES, rows["num_tokens"].to_numpy())]
    others = pa.array(_ORIGINS).take(rows["cross_user"].cast(pa.int8()).fill_null(2))
    return {
        "language": _languages(rows),
        "length": pa.array(lengths),
        "turn": pc.if_else(pc.greater(rows["turn"], 0), "later", "first").fill_null("unknown"),
        "origin": pc.if_else(pc.equal(rows["num_hit"], 0), "none", others),
    }


def describe_data(
    rows: pa.Table, *, sha256: str, files: tuple[schema.LogFile, ...], unreadable: Unreadable
) -> schema.Data:
    """Describe what of the log was replayed; `rows` are those of any policy."""
    numbered = ("conversation", "user", "namespace")
    return schema.Data(
        files=files,
        sha256=sha256,
        num_requests=len(rows),
        num_tokens=pc.sum(rows["num_tokens"]).as_py() or 0,
        num_answer_tokens=pc.sum(rows["num_answer_tokens"]).as_py() or 0,
        **{f"num_{name}s": pc.count_distinct(rows[name]).as_py() for name in numbered},
        languages=_counted(_languages(rows)),
        length_histogram=histogram(LENGTH_EDGES, rows["num_tokens"]),
        unreadable=unreadable,
    )


def policy_results(
    rows: pa.Table, store: schema.Store, tree: schema.Tree | None = None, *, prefill_tokens_per_s: float
) -> schema.PolicyResults:
    """Everything of one policy with one store that does not depend on a clock."""
    requests, (tokens, hit) = each_request(rows), _tokens_and_hits(rows)
    final_bytes = pc.last(rows["num_stored_bytes"]).as_py() or 0
    by = {}
    for group, keys in _keys(rows).items():
        sums_by_key = sorted(grouped(requests, keys).items())
        by[group] = {key: _figures(sums, prefill_tokens_per_s) for key, sums in sums_by_key}
    return schema.PolicyResults(
        **dict(store),
        **dict(_figures(_totals(requests), prefill_tokens_per_s)),
        coverage_histogram=tuple(np.bincount(100 * hit // np.maximum(tokens, 1), minlength=101).tolist()),
        num_copies=histogram(COUNT_EDGES, rows["num_copies"]),
        num_donors=histogram(COUNT_EDGES, rows["num_donors"]),
        shift_tokens=histogram(SHIFT_EDGES, np.abs(pc.list_flatten(rows["shifts"]))),
        reasons=_counted(rows["reason"]),
        storage=schema.StorageFigures(
            final_bytes=final_bytes,
            peak_bytes=pc.max(rows["num_stored_bytes"]).as_py() or 0,
            bytes_per_request=final_bytes / max(1, len(rows)),
        ),
        series=stretches(rows),
        by=by,
        tree=tree,
    )


def policy_times(
    rows: pa.Table, *, prefill_tokens_per_s: float, embedding_s: float = 0.0
) -> schema.PolicyTimes:
    """Return the figures that depend on a clock. `embedding_s`: for one text, made before the look-up."""
    sums, num_requests = _totals(rows.select(["num_hit", "embedded", *_CLOCKS])), len(rows)
    spent_s = sums["lookup_s"] + sums["plan_s"] + sums["embedded"] * embedding_s
    net_s = sums["num_hit"] / prefill_tokens_per_s - spent_s
    return schema.PolicyTimes(
        lookup_ms=milliseconds(rows["lookup_s"]),
        plan_ms=milliseconds(rows["plan_s"]),
        observe_ms=milliseconds(rows["observe_s"]),
        requests_per_s=num_requests / sums["observe_s"] if sums["observe_s"] else 0.0,
        ttft_saved_net_s=schema.NetSaved(mean=net_s / max(1, num_requests), total=net_s),
    )


def similarity(families: Mapping[str, str], rows_of: RowsOf) -> schema.Similarity | None:
    """
    The embedding distance to the nearest earlier prompt, against the share of tokens that could be reused.

    `families`: of the policies with infinite stores, in the given order. None if no policy embeds.
    """
    policies = {family: name for name, family in reversed(list(families.items()))}  # the first of each family
    overlap = policies.get("oracle", policies.get("kvshare"))
    if "response" not in policies or overlap is None:
        return None
    distances = rows_of(policies["response"])["distance"].to_numpy().astype(np.float64)  # NaN: none
    tokens, hit = _tokens_and_hits(rows_of(overlap))
    edges = [*DISTANCE_EDGES, np.inf], [*OVERLAP_EDGES, np.inf]
    requests = np.histogram2d(distances, hit / np.maximum(tokens, 1), edges)[0].astype(int)
    num_requests = max(1, len(distances))
    return schema.Similarity(
        distance_edges=DISTANCE_EDGES,
        overlap_edges=OVERLAP_EDGES,
        counts=tuple(map(tuple, requests.tolist())),
        overlap=overlap,
        thresholds=tuple(
            schema.Threshold(distance=limit, share=int((distances <= limit).sum()) / num_requests)
            for limit in DISTANCE_THRESHOLDS
        ),
    )


def waterfalls(families: Mapping[str, str], rows_of: RowsOf) -> tuple[schema.Waterfall, ...]:
    """Say how the oracle's tokens are lost, for each kvshare policy with an infinite store."""
    oracle = next((name for name, family in families.items() if family == "oracle"), None)
    if oracle is None:
        return ()
    covered = rows_of(oracle)["num_hit"].to_numpy()  # the oracle's tokens of each request
    num_covered, results = int(covered.sum()), []
    for policy in (name for name, family in families.items() if family == "kvshare"):
        rows = rows_of(policy)
        sums = _totals(each_request(rows))
        is_short = pc.equal(rows["reason"], "short_prompt").fill_null(False).to_numpy(zero_copy_only=False)
        generation = sums["num_refused_generation"]
        losses = {
            "too_short": int(covered[is_short].sum()),  # prompts that are not looked up
            "generation": generation,
            "refused": sums["num_refused"] - generation,
            "repaired": sums["num_repaired"],
        }
        steps = {
            "oracle": num_covered,
            "not_found": sums["num_hit"] + sum(losses.values()) - num_covered,
            **{name: -lost for name, lost in losses.items()},
            "hit": sums["num_hit"],
        }
        parts = tuple(schema.Step(name=name, num_tokens=value) for name, value in steps.items())
        results.append(schema.Waterfall(arm=policy, num_tokens=sums["num_tokens"], steps=parts))
    return tuple(results)


def _tokens_and_hits(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    tokens, hit = (rows[name].to_numpy().astype(np.int64) for name in ("num_tokens", "num_hit"))
    return tokens, hit


def _counted(column: pa.ChunkedArray) -> dict[str, int]:
    """Count each value, in alphabetical order; null is not counted."""
    found = column.drop_null().value_counts().to_pylist()
    return dict(sorted((one["values"], one["counts"]) for one in found))


def buckets(edges: ArrayLike, values: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the bucket of each value; values below the first edge count in the first."""
    return np.maximum(np.searchsorted(edges, values, side="right") - 1, 0)


def histogram(edges: tuple[int | float, ...], values: ArrayLike) -> schema.Histogram:
    array = np.asarray(values)
    return schema.Histogram(
        edges=edges,
        counts=tuple(np.bincount(buckets(edges, array), minlength=len(edges)).tolist()),
        mean=float(array.mean()) if len(array) else 0.0,
        max=array.max().item() if len(array) else 0.0,
        count=len(array),
    )


def milliseconds(seconds: ArrayLike) -> schema.Milliseconds:
    """Percentiles are values that occurred; without any value all are 0."""
    array = 1000 * np.asarray(seconds, dtype=np.float64)
    array = array if len(array) else np.zeros(1)
    p50, p90, p99 = np.percentile(array, (50, 90, 99), method="inverted_cdf").tolist()
    return schema.Milliseconds(mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()))


def stretches(rows: pa.Table) -> tuple[schema.Stretch, ...]:
    """Return a policy's rows in at most 200 stretches of the stream, whose equal length is a power of two."""
    length = 1
    while length * _MAX_STRETCHES < len(rows):
        length *= 2
    starts = np.arange(0, len(rows), length)
    ends = np.minimum(starts + length, len(rows))
    tokens, hits = (np.add.reduceat(rows[name].to_numpy(), starts) for name in ("num_tokens", "num_hit"))
    first, stored = rows["index"].to_numpy()[starts], rows["num_stored_bytes"].to_numpy()[ends - 1]
    columns = (first, ends - starts, tokens, hits, stored)
    return tuple(map(schema.Stretch._make, zip(*(column.tolist() for column in columns), strict=True)))
