"""
Two replays of one log compared, policy by policy, with bootstrap intervals.

The comparison is paired: each request's outcome in one run with its outcome in the other. The bootstrap draws
whole conversations, because the turns of one share their history and are not independent.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvshare.errors import LogError
from kvshare.replay.measures import SUMMED, each_request, grouped
from kvshare.replay.results import REQUESTS_FILE, SCHEMA_VERSION, SHARES, Document, policy_label
from kvshare.replay.rows import read_policy
from kvshare.replay.whole_files import cannot_be_read, read_results

_COLUMNS = ["index", "conversation", *SUMMED]
_DRAWS_AT_ONCE = 50
_LOW, _HIGH = 2.5, 97.5

Table = NDArray[np.float64]

# Ratios of two sums over requests.
_FIGURES = {
    "token_hit_rate": ("num_hit", "num_tokens"),
    "request_hit_rate": ("with_0", "requests"),
    **{f"request_hit_rate_{share}": (f"with_{share}", "requests") for share in SHARES},
    "false_hits_per_request": ("false_hit", "requests"),
}
_SUMS = sorted({name for pair in _FIGURES.values() for name in pair})


def diff(a: Path, b: Path, *, resamples: int = 2000, seed: int = 0) -> Document:
    """
    Return each figure of `a` and `b`, and the difference b - a with its 95 % interval, for the policies of
    both.

    `a` and `b` are folders of results. Raises LogError if they cannot be read or replayed different logs.
    """
    if read_results(a)["data"]["sha256"] != read_results(b)["data"]["sha256"]:
        raise LogError("cannot compare runs of different logs, limits, orders or tokenizers")
    rows_a, rows_b = _rows(a), _rows(b)
    rng = np.random.default_rng(seed)
    policies = [
        {"label": label, "figures": _compare(rows, rows_b[label], rng, resamples)}
        for label, rows in rows_a.items()
        if label in rows_b
    ]
    return {
        "kind": "replay-diff",
        "schema_version": SCHEMA_VERSION,
        "resamples": resamples,
        "seed": seed,
        "only_in_a": [label for label in rows_a if label not in rows_b],
        "only_in_b": [label for label in rows_b if label not in rows_a],
        "arms": policies,
    }


def _compare(a: pa.Table, b: pa.Table, rng: np.random.Generator, resamples: int) -> list[Document]:
    both = np.stack([_sums_by_conversation(a), _sums_by_conversation(b)])  # (2, C, S)
    num = both.shape[1]
    sizes = (min(_DRAWS_AT_ONCE, resamples - start) for start in range(0, resamples, _DRAWS_AT_ONCE))
    # (2, R, S): sums over conversations, drawn with replacement, the same in both runs
    draws = [rng.multinomial(num, np.full(num, 1 / num), size=size) @ both for size in sizes]
    whole, drawn = both.sum(axis=1), np.concatenate(draws, axis=1)
    documents = []
    for name in _FIGURES:
        of_a, of_b = _ratio(whole, name).tolist()
        drawn_a, drawn_b = _ratio(drawn, name)
        low, high = np.percentile(drawn_b - drawn_a, [_LOW, _HIGH]).tolist()
        figures = {"name": name, "a": of_a, "b": of_b, "difference": of_b - of_a, "low": low, "high": high}
        documents.append({**figures, "differs": low > 0 or high < 0})
    return documents


def _ratio(sums: Table, name: str) -> Table:
    above, below = (sums[..., _SUMS.index(one)] for one in _FIGURES[name])
    return np.asarray(above / np.maximum(below, 1.0))


def _sums_by_conversation(rows: pa.Table) -> Table:
    sums = grouped(each_request(rows), rows["conversation"])
    return np.array([[own[name] for name in _SUMS] for own in sums.values()], np.float64)


def _rows(folder: Path) -> dict[str, pa.Table]:
    """Return the rows of each policy, by request."""
    path = folder / REQUESTS_FILE
    try:
        rows = pq.read_table(path, columns=["arm", "capacity_tokens"])
        stores = rows.group_by(rows.column_names, use_threads=False).aggregate([]).to_pylist()
        named = [(store["arm"], store["capacity_tokens"]) for store in stores]
        return {policy_label(*store): read_policy(path, *store, columns=_COLUMNS) for store in named}
    except (OSError, pa.ArrowInvalid) as exc:
        raise cannot_be_read(folder, exc, name=REQUESTS_FILE) from exc
