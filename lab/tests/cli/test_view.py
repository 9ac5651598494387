"""The document of a benchmark on a terminal of 80 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvshare.cli.views import draw
from kvshare_lab.cli import view

MEASURED = Path(__file__).parents[3] / "docs" / "measured"
ARMS = {
    name: {"mean_ms": 123.4, "p99_ms": 234.5, "max_ms": 1234.5}
    for name in ("quiet", "full", "saves", "loads")
}
BACKEND = {
    "backend": "FLASHINFER",
    "self_test": {"passed": True, "attention_backend": "FLASHINFER"},
    "parity": {"max_abs_logprob_error": 0.0123, "noise": 0.0045},
    "ttft": {
        "measured_tokens": 1234,
        "learned_tokens": 2345,
        "lengths": [
            {
                "tokens": 131_072,
                "prefix": {"speedup": 12.34},
                "changed": [{"share": 0.01, "speedup": 12.34}, {"share": 0.1, "speedup": 0.98}],
            }
        ]
        * 2,
    },
    "load": {"closed_loop": [{"near": near, "throughput_ratio": 1.23} for near in (1, 0.5, 0)]},
    "inter_token": {"arms": ARMS},
    "soak": {"wrong_outputs": 12, "failed": {"shared": 1, "plain": 2}, "requests": 123_456},
    "syncs": None,
    "not_measured": {"syncs": "this vLLM reports no synchronisations, as its build has no such check"},
}
GPU = {
    "benchmark": "gpu",
    "servers": {"model": "Qwen3-8B-Instruct", "vllm": {"dtype": "bfloat16", "enforce_eager": False}},
    "environment": {"device": {"name": "an accelerator of 2026", "num_bytes": 2**37}, "vllm": "vLLM 0.32.0"},
    "copy_bytes_per_s": dict.fromkeys(
        ("to_device_pinned", "to_device_pageable", "to_host_pinned", "to_host_pageable", "host_to_host"),
        12.3e9,
    ),
    "backends": [BACKEND, {**BACKEND, "backend": "TRITON_ATTN", "parity": None}],
    "passed": False,
    "finished": False,
    "ended_by": "Terminated",
}
LACKING = {**dict.fromkeys(BACKEND), "backend": "ONE", "not_measured": {"soak": "no time was left"}}
REFUSED = {**BACKEND, "self_test": {"passed": False, "refusals": ["no KV", "no hash"]}}
INDEX = json.loads((MEASURED / "index.json").read_text("utf-8"))


@pytest.mark.parametrize("document", [INDEX, GPU], ids=["index", "gpu"])
def test_it_fits_80_columns(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """No line is longer, and nothing is cut."""
    draw(view.bench, document, width=80)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"environment": {"device": None, "cpu": "a CPU", "vllm": "vLLM 1"}}, ["on a CPU, vLLM 1"]),
        ({"backends": [LACKING, REFUSED]}, ["ONE, no soak: no time was left", "no KV; no hash"]),
        ({"passed": True, "finished": True, "copy_bytes_per_s": None}, ["passed"]),
    ],
    ids=["no device", "a part is missing", "passed"],
)
def test_it_says_what_is_missing(
    changes: dict[str, Any], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, with blanks between columns taken as one."""
    draw(view.bench, {**GPU, **changes})
    shown = " ".join(capsys.readouterr().out.split())
    assert [text for text in texts if text not in shown] == []
