"""On a terminal of 80 columns every command's tables fit, and none of their cells is cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvshare.cli.server_checks import check_formats, check_replicas
from kvshare.cli.views import VIEWS, draw
from tests.kvshare.cli.conftest import EXPLANATION
from tests.kvshare.cli.costs import COSTS
from tests.kvshare.cli.tenant_views import TENANT_VIEWS
from tests.kvshare.cli.tier_views import TIERS
from tests.kvshare.replay.report.small_results import results

WIDTH, NODE, DIGEST = 80, 8_654_221_355_326_034, "f3a9c1d2e4b5" + "0" * 52
MANY = {
    "num_nodes": 123_456,
    "num_pinned": 12_345,
    "max_depth": 12,
    "num_tokens": 234_567_890,
    "num_stored_tokens": 123_456_789,
    "num_segments": 456_789,
    "num_bytes": 123_456_789_012,
}
PINS = {"num_bytes": 12_345_678_901, "max_bytes": 23_456_789_012}


def prompt(*children: Any, num_children: int | None = None) -> dict[str, Any]:
    return {
        "id": NODE,
        "namespace": DIGEST,
        "num_tokens": 131_072,
        "exact_length": 131_072,
        "own_bytes": 1_234_567_890,
        "subtree_bytes": 123_456_789_012,
        "num_hits": 12_345,
        "age_s": 3600.0,
        "idle_s": 3500.0,
        "pinned": True,
        "num_children": len(children) if num_children is None else num_children,
        "children": list(children),
    }


EDITS = {
    "counts": {"keep": 131_000, "insert": 1, "replace": 1, "delete": 1},
    "ops": [{"op": "replace", "source": [131_000, 131_072], "target": [131_000, 131_072]}],
}
PIECE = {
    "start": 131_000,
    "end": 131_072,
    "segment": "f" * 16,
    "offset": 131_072,
    "shift": -131_072,
    "generation": 1,
    "num_references": 12_345,
    "num_bytes": 123_456_789,
}
DONOR = {
    "node": NODE,
    "sources": ["prefix", "fingerprints", "embedding"],
    "score": 123.456,
    "similarity": 0.987,
    "tokens_used": 131_072,
    "outcome": "used",
}
SPAN = {"start": 130_000, "end": 131_072, "kind": "placeholder", "donor": NODE, "shift": -131_072}
PREDICTION = {
    "expected": 0.0123,
    "bound": 0.0321,
    "inherited": 0.001,
    "limit": 0.02,
    "rule": "windows",
    "repaired": 1234,
    "calibration": "smollm2-135m-instruct",
    "caution": 4.0,
}
MISSED = {"type": "deviates_too_much", "message": "Text at other places was not reused, as it deviates."}
PLACE = {"file": "prompts/of/the/house.jsonl", "line": 123_456, "label": "contract of the tenants"}
WARM = {
    **dict.fromkeys(("tokens", "computed", "exact", "copied"), 123_456_789),
    "entries": 12_345,
    "stored": 12_345,
    "known": 12_345,
    "failed": 1,
    "seconds": 12_345.6,
    "failures": [{**PLACE, "reason": "http_400 messages[0].content"}],
    "prompts": [{**PLACE, "node": NODE, "tokens": 131_072, "pinned": True}],
}
ROWS = {"heads": 128, "dim": 576, "error": 2e-06, "control": 12_399.0, "why": None}
LAYER = {
    "layer": 0,
    "sees": "all earlier tokens",
    "rows": [
        {**ROWS, "name": "latent", "moves": "interleaved 512:576"},
        {**ROWS, "name": "k", "moves": None, "why": "dynamic NTK: the table depends on the length"},
    ],
}
VERIFIED = {
    "model": "SmolLM2-135M-Instruct",
    "dtype": "bfloat16",
    "max_model_len": 131_072,
    "why": None,
    "bytes_per_token": 123_456,
    "shares": "everything",
    "repairs": "any",
    "attention_error": 1e-5,
    "layers": [{**LAYER, "layer": number} for number in (0, 1, 2, 3, 7, 9)],
}
CHECKS = [asdict(check) for check in (*check_replicas(()), check_formats())]
MEASURED = Path(__file__).parents[3] / "docs" / "measured"
_SMALL = results()
REPLAY = {
    **_SMALL,
    "data": {
        **_SMALL["data"],
        "num_requests": 1_234_567,
        "num_conversations": 123_456,
        "num_tokens": 1_234_567_890,
    },
    "times": {"requests_per_s": 12_345.6},
}
FIGURE = {"name": "token_hit_rate", "a": 0.98765, "b": 0.12345, "difference": -0.8642, "low": -0.87654}
POLICY = "kvshare:exact,min_run=16,max_donors=4@16GiB"
DIFFERENCE = {
    "arms": [{"label": POLICY, "figures": [{**FIGURE, "high": -0.85432, "differs": True}]}],
    "only_in_a": [POLICY],
    "only_in_b": ["prefix", "chunks"],
}
LIVE = {
    "complete": False,
    "num_requests": 1_234_567,
    "num_failed": 12_345,
    "requests_per_s": 1234.5,
    "ttft_ms": {"p50": 123_456.0, "p99": 234_567.0},
    "reported": {"token_hit_rate": 0.98765},
    "token_counts": {"num_unlike": 12_345, "num_requests": 1_234_567, "server": 234_567_890, "here": 1},
    "data": {
        "unreadable": {
            "num_rows": 12_345,
            "lines": [{"source": "log.jsonl", "line": 7, "reason": "no prompt"}],
        }
    },
    "predicted": [
        {"arm": POLICY, "token_hit_rate": 0.98765, "mean_difference": 0.12345, "within_5_percent": 0.98765}
    ],
    "ttft_ms_by_cached_share": [{"from": 0.9, "num_requests": 1_234_567, "p50": 123_456.0, "p99": 234_567.0}],
}
LIBRARIES = {"torch": "2.13.0+cpu", "sentence-transformers": "5.6.0", "vllm": None}

TIER = {
    "name": "memory",
    "num_segments": 456_789,
    "num_bytes": 123_456_789_012,
    "max_bytes": 234_567_890_123,
    "num_hits": 1_234_567,
    "num_misses": 123_456,
    "num_due_bytes": 1_234_567_890,
    "num_written": 456_789,
    "num_dropped": 12,
    "num_late": 1_234,
    "problem": "the disk is full",
}
DAMAGE = {"file": "0123456789abcdef.safetensors", "problem": "layer 27 is not what was written"}

DOCUMENTS: Mapping[str, Any] = {
    "stats": {"totals": MANY, "namespaces": [{**MANY, "namespace": DIGEST}], "pins": PINS, "costs": COSTS},
    "tiers": {"tiers": [TIER, {**TIER, "name": "disk"}]},
    "store_verify": {"num_objects": 456_789, "num_bytes": 10**11, "seconds": 123.4, "damaged": [DAMAGE]},
    "store_gc": {"dry_run": True, "num_files": 456_789, "num_bytes": 123_456_789_012},
    "tree": {"roots": [prompt(prompt(prompt(prompt(num_children=34)))), prompt()]},
    "node": {
        **prompt(),
        "parents": [NODE, NODE],
        "num_children": 456_789,
        "children": [NODE] * 9,
        "edits": EDITS,
        "pieces": [PIECE],
        "num_shared_with": 456_789,
        "shared_with": [{"id": NODE, "num_tokens": 131_072}],
    },
    "diff": {
        "a": NODE,
        "b": NODE,
        "edits": EDITS,
        "num_common_prefix": 131_000,
        "kept_share_of_a": 0.987,
        "kept_share_of_b": 0.987,
    },
    "evict": {"dry_run": True, "num_nodes": 1, "num_segments": 2, "freed_bytes": 123_456_789},
    "pin": {"num_nodes": 12_345, "num_bytes": 123_456_789_012},
    "unpin": {"num_nodes": 12_345, "num_bytes": 123_456_789_012},
    "explain": {
        **EXPLANATION,
        "spans": [SPAN],
        "donors": [DONOR, {**DONOR, "outcome": "too little in common"}],
        "prediction": PREDICTION,
        "cache_miss_reason": MISSED,
        "rules": ["nonce", "clock"],
    },
    "warm": WARM,
    "verify": VERIFIED,
    "doctor": {"checks": CHECKS},
    "version": {"kvshare": "0.2.0", "python": "3.11.7", "libraries": LIBRARIES},
    **TENANT_VIEWS,
    "key": {"key": "kvs-" + "a" * 43, "sha256": "0" * 64},
    "replay": REPLAY,
    "replay-diff": DIFFERENCE,
    "replay-live": LIVE,
    "replay-tiers": TIERS,
    "replay-paper": json.loads((MEASURED / "replay" / "paper-template.json").read_text("utf-8")),
    "ready": {"url": "http://127.0.0.1:8000", "model": "smollm2-135m-instruct", "ready_s": 12.3},
}


@pytest.mark.parametrize("view", DOCUMENTS)
def test_it_fits_80_columns(view: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No line is longer, nothing is cut, and no id is broken over two lines."""
    draw(view, DOCUMENTS[view], width=WIDTH)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "…" not in text
    assert text.count(str(NODE)) == "".join(text.split()).count(str(NODE))


def test_every_view_is_here() -> None:
    """But the settings, which are YAML as they were given."""
    assert set(VIEWS) - {"settings"} == set(DOCUMENTS)


def test_numbers_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts with nine digits stand in one line beside the others."""
    draw("stats", DOCUMENTS["stats"], width=WIDTH)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith(DIGEST[:12]))
    assert line.split() == [
        *(DIGEST[:12], "123,456", "12,345", "12", "234,567,890", "123,456,789", "456,789", "123", "GB")
    ]


def test_what_hangs_below_a_prompt_is_indented(capsys: pytest.CaptureFixture[str]) -> None:
    """A line a prompt, its number whole; what is not shown is counted."""
    draw("tree", DOCUMENTS["tree"], width=WIDTH)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"namespace {DIGEST[:12]}"
    assert [line.index(str(NODE)) for line in lines if str(NODE) in line] == [0, 2, 4, 6, 0]
    assert sum(line.strip() == "34 more" for line in lines) == 1
