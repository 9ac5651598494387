"""
The files a replay writes: their names, their schema, their version. report/ draws only what stands here.

    OUT/results.json       one document, see below; equal for equal input, config and seed, but for "times"
    OUT/requests.parquet   one row a request and arm, `COLUMNS`
    OUT/paper.json         only with --paper; see paper.py
    OUT/checkpoint/        while a run is not finished

No prompt text, no token ids, no user names, no folders: numbers, and labels of ours. Languages and file names
are the only words that come from the log.

    results.json
    {
      "schema_version": 1, "kind": "replay", "complete": true,
      "config": {"arms": [spec, ...], "capacities_tokens": [...], "bytes_per_token", "prefill_tokens_per_s",
                 "limit", "seed", "interleave", "format", "tokenizer": {"name", "sha256"}, "embedder",
                 "settings": {"sharing", "repair", "cost", "index"}},
      "data": {"files": [{"name", "num_bytes", "sha256"}], "sha256": of the tokens in order, "num_requests",
               "num_tokens", "num_answer_tokens", "num_conversations", "num_users", "num_namespaces",
               "languages": {language: requests}, "length_histogram": Histogram of prompt tokens,
               "unreadable": {"num_rows", "reasons": {reason: rows},
                              "lines": [{"source", "line", "reason"}]}},
      "versions": {"kvshare", "python", "numpy", "pyarrow", "qdrant_edge", "rapidfuzz"},
      "arms": [Arm, ...],                 in the order asked for; per arm the infinite store first
      "similarity": Similarity | null,    null: no arm looked at meaning
      "waterfall": [Waterfall, ...],      one per KVShare arm with an infinite store, where the oracle ran too
      "times": {...}                      everything that a clock had a part in
    }

    Arm
    {
      "arm": "kvshare:min_run=32", "label": arm, or "arm @ 1,000,000 tokens", "family": "kvshare",
      "capacity_tokens": 1000000 | null (infinite), "capacity_bytes": ... | null, "options": {...},
      ...Figures of all requests,
      "coverage_histogram": [101 counts]  requests by percent of tokens not computed: bucket i is [i, i+1),
      "num_copies", "num_donors", "shift_tokens": Histogram
      "reasons": {reason why nothing or no more was shared: requests},
      "storage": {"final_bytes", "peak_bytes", "bytes_per_request"},
      "series": [[first request, requests, tokens, hit tokens, stored bytes at the end], ...]  100 to 200
                 stretches of the stream,
      "by": {"language" | "length" | "turn" | "origin": {key: Figures}},
                 turn: first, later, unknown; origin: same_user, cross_user, none, or unknown, which is from
                 another conversation where the log names no users
      "tree": {"depth": Histogram, "children": Histogram, "num_nodes", "num_roots", "num_segments",
               "num_prompt_tokens", "num_stored_tokens"} | null      KVShare arms only
    }

    Figures
    {
      "num_requests", "num_tokens", "num_hit_tokens", "num_exact_tokens", "num_repaired_tokens",
      "token_hit_rate",                hit tokens / tokens
      "request_hit_rate",              requests with any hit
      "request_hit_rate_50" | "_70" | "_90"    requests with at least that share of their tokens not computed
      "recomputed_fraction",           1 - token_hit_rate
      "num_answered", "num_false_hits", "false_hit_share"    response caches; the share is of those answered
      "ttft_saved_s": {"mean", "total", "share"}    estimated: hit tokens at the given prefill speed, the
                                                    lookup not taken off (see times); share of all prefill
    }

    Histogram   {"edges": [e0, e1, ...], "counts": [n0, n1, ...], "mean", "max", "count"}
                bucket i holds [edges[i], edges[i + 1]); the last one is open

    Similarity  {"distance_edges": [...], "overlap_edges": [...], "counts": [[...]] a row per distance,
                 "overlap": "oracle" | name of the arm whose hits are meant,
                 "thresholds": [{"distance", "share"}] of requests with an earlier prompt so near}

    Waterfall   {"arm": label, "num_tokens", "steps": [{"name", "num_tokens"}, ...]}
                from what the oracle covers down to what was not computed, the steps' tokens adding up:
                oracle, then losses (negative): not_found; too_short, all that the oracle has of
                prompts that are not looked up; generation, refused if only the generation did not
                matter; refused, by the other gates and the number of donors; repaired; then hit. An
                equal prefix of less than 16 tokens, copied along with more, can make not_found
                positive

    times
    {
      "started_at", "wall_s", "requests_per_s", "resumed": times,
      "embedding": {"num_texts", "seconds", "texts_per_s"} | null,
      "arms": {label: {"lookup_ms", "plan_ms", "observe_ms": {"mean", "p50", "p90", "p99", "max"},
                       "requests_per_s",   its second look at what the gates cost included
                       "ttft_saved_net_s": {"mean", "total"}}}   less lookup, plan and, for each text
                                           embedded for the lookup, the mean time of a text
    }
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

SCHEMA_VERSION: Final = 1
RESULTS_FILE: Final = "results.json"
REQUESTS_FILE: Final = "requests.parquet"
PAPER_FILE: Final = "paper.json"
CHECKPOINT_FOLDER: Final = "checkpoint"

Document = dict[str, Any]
Row = dict[str, Any]

# Column -> pyarrow type name. Users, conversations and namespaces are numbered in the order they first came.
COLUMNS: Final[dict[str, str]] = {
    "index": "int64",  # place in the stream, from 0
    "arm": "string",  # "kvshare:min_run=32"
    "capacity_tokens": "int64",  # null: infinite
    "namespace": "int32",
    "user": "int32",  # null: the log does not name users
    "conversation": "int32",
    "turn": "int32",  # null: the log does not say
    "language": "string",
    "time_s": "float64",
    "num_tokens": "int32",
    "num_answer_tokens": "int32",
    "num_hit": "int32",
    "num_exact": "int32",
    "num_repaired": "int32",
    "num_copies": "int32",
    "num_donors": "int32",
    "shifts": "list<int32>",  # of the copies, in tokens, signed
    "cross_user": "bool",  # null: the log does not tell
    "answered": "bool",  # by a response cache
    "false_hit": "bool",
    "distance": "float32",  # cosine, to the nearest earlier prompt; null where the arm does not look
    "reason": "string",  # why nothing or no more was shared; null: nothing was refused
    "num_refused": "int32",  # tokens a gate refused, that the arm's candidates had
    "num_refused_generation": "int32",  # of these, taken if only the generation did not matter
    "embedded": "bool",  # for the look-up; the time it took is no part of it
    "num_stored_bytes": "int64",  # in the arm's store, after this request
    "lookup_s": "float32",
    "plan_s": "float32",
    "observe_s": "float32",  # all the arm did for this request: look up, plan, tell what gates cost, store
}

LENGTH_EDGES: Final = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
COUNT_EDGES: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
SHIFT_EDGES: Final = (0, 1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # absolute
DISTANCE_EDGES: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
OVERLAP_EDGES: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DISTANCE_THRESHOLDS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)


def arm_label(arm: str, capacity_tokens: int | None) -> str:
    """How results and reports call an arm with its store."""
    return arm if capacity_tokens is None else f"{arm} @ {capacity_tokens:,} tokens"


def length_bucket(num_tokens: int) -> str:
    """The key under `by.length`: "512-1023", or "32768-" for the last."""
    for low, high in pairwise(LENGTH_EDGES):
        if num_tokens < high:
            return f"{low}-{high - 1}"
    return f"{LENGTH_EDGES[-1]}-"
