"""The costs that a server of ours reports, written by hand."""

from __future__ import annotations

from kvshare.admin import Costs

COSTS: Costs = {
    "step_s": 0.0087,
    "token_s": 2e-5,
    "pair_s": 1e-9,
    "pass_s": 0.005,
    "reused_s": 2e-7,
    "loads": {"memory": {"fixed_s": 0.001, "bytes_per_s": 2e10}},
    "full_s": {"1024": 0.0302, "8192": 0.222},
    "lookup_s": {"1024": 0.001, "8192": 0.0058},
    "embedding_s": {"1024": 0.025, "8192": 0.038},
    "bytes_per_token": 147_456,
    "num_extra_passes": 1,
    "machine": "a CPU",
    "measured": ["load", "prefill"],
    "break_even_tokens": 1234,
}
