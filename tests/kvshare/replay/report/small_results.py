"""Results of replays that never were: the real measures over rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvshare.replay.measures import policy_results, policy_times, similarity, waterfalls
from kvshare.replay.results import REQUESTS_FILE, RESULTS_FILE, Store, Tree, policy_label
from kvshare.replay.rows import SCHEMA, write_rows

Stores = Sequence[tuple[str, str, int | None]]
"""Arm, family and capacity."""

STORES: Stores = (
    ("nothing", "nothing", None),
    ("prefix", "prefix", None),
    ("prefix", "prefix", 1000),
    ("chunks", "chunks", None),
    ("response", "response", None),
    ("kvshare", "kvshare", None),
    ("kvshare", "kvshare", 1000),
    ("kvshare", "kvshare", 50_000),
    ("kvshare-open", "kvshare", None),
    ("oracle", "oracle", None),
)
TREE = {
    "depth": {"edges": [0, 1, 2, 3], "counts": [0, 9, 4, 1], "mean": 1.4, "max": 7, "count": 14},
    "children": {"edges": [0, 1, 2, 3], "counts": [8, 4, 2, 0], "mean": 0.6, "max": 2, "count": 14},
    "num_nodes": 14,
    "num_roots": 9,
}
CONSTANT = {  # of each row
    "num_tokens": 200,
    "num_answer_tokens": 20,
    "num_refused": 0,
    "num_refused_generation": 0,
    "embedded": False,
    "lookup_s": 0.001,
    "plan_s": 0.002,
    "observe_s": 0.004,
}


def row(index: int, arm: str, capacity: int | None, hit: float, **changes: Any) -> dict[str, Any]:
    """One request at one arm that need not compute a share of its 200 tokens."""
    num_hit = round(200 * hit)
    values = {
        "index": index,
        "arm": arm,
        "capacity_tokens": capacity,
        "namespace": 0,
        "user": index % 5,
        "conversation": index // 2,
        "turn": index % 2,
        "language": "English" if index % 3 else "Russian",
        "time_s": float(index),
        "num_hit": num_hit,
        "num_exact": num_hit // 2,
        "num_repaired": 10 if arm == "kvshare" and num_hit else 0,
        "num_copies": 2 if num_hit else 0,
        "num_donors": 1 if num_hit else 0,
        "shifts": [3, -40] if num_hit else [],
        "cross_user": index % 4 == 0,
        "answered": arm == "response" and index % 6 == 5,
        "false_hit": arm == "response" and index % 12 == 5,
        "distance": (index % 10) / 10 if arm == "response" and index else None,
        "reason": None if num_hit else "no_candidates",
        "num_stored_bytes": 1000 * (index + 1) if arm != "nothing" else 0,
    }
    return {**CONSTANT, **values, **changes}


def results(
    num_requests: int = 60, *, hit: float = 0.8, stores: Stores = STORES, **changes: Any
) -> dict[str, Any]:
    """`results.json` of so many requests; `hit` is what the oracle covers of every second one."""
    rows = list(rows_of(num_requests, hit=hit, stores=stores))
    tables = {
        policy_label(arm, capacity): pa.Table.from_pylist(rows[number :: len(stores)], schema=SCHEMA)
        for number, (arm, _, capacity) in enumerate(stores)
    }
    endless = {arm: family for arm, family, capacity in stores if capacity is None}
    similar = similarity(endless, tables.__getitem__)
    document = {
        "schema_version": 1,
        "kind": "replay",
        "config": {"arms": [arm for arm, _, _ in stores], "prefill_tokens_per_s": 1000.0, "seed": 0},
        "data": {
            "files": [{"name": "log.jsonl", "num_bytes": 12345, "sha256": "0" * 64}],
            "sha256": "f" * 64,
            "num_requests": num_requests,
            "num_tokens": 200 * num_requests,
            "num_conversations": num_requests // 2,
            "num_users": 5,
            "length_histogram": {
                "edges": [0, 64],
                "counts": [0, num_requests],
                "mean": 200.5,
                "max": 200.0,
                "count": num_requests,
            },
            "unreadable": {"num_rows": 0, "reasons": {}, "lines": []},
        },
        "versions": {"kvshare": "0", "python": "3.11"},
        "arms": [_arm(*store, tables[policy_label(store[0], store[2])]) for store in stores],
        "similarity": None if similar is None else similar.model_dump(mode="json"),
        "waterfall": [one.model_dump(mode="json") for one in waterfalls(endless, tables.__getitem__)],
        "times": {
            "started_at": "2026-01-02T03:04:05+00:00",
            "arms": {
                label: policy_times(own, prefill_tokens_per_s=1000.0).model_dump()
                for label, own in tables.items()
            },
        },
    }
    return {**document, **changes}


def rows_of(num_requests: int, *, hit: float = 0.8, stores: Stores = STORES) -> Iterator[dict[str, Any]]:
    """The rows of `requests.parquet`, in order."""
    share = {"nothing": 0.0, "response": 0.0, "prefix": 0.4, "chunks": 0.6, "kvshare": 0.7}
    for index in range(num_requests):
        for arm, _, capacity in stores:
            part = share.get(arm, 1.0) * (0.5 if capacity else 1.0)
            yield row(index, arm, capacity, hit * part * (index % 2))


def write_results(folder: Path, document: dict[str, Any], num_requests: int = 0) -> Path:
    """Both files of a finished replay."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS_FILE).write_text(json.dumps(document), encoding="utf-8")
    if num_requests:
        write_rows(folder / REQUESTS_FILE, list(rows_of(num_requests)))
    return folder


def _arm(arm: str, family: str, capacity: int | None, rows: pa.Table) -> dict[str, Any]:
    store = Store(arm=arm, label=policy_label(arm, capacity), family=family, capacity_tokens=capacity)
    tree = Tree.model_validate(TREE) if family == "kvshare" else None
    return policy_results(rows, store, tree, prefill_tokens_per_s=1000.0).model_dump(mode="json")
