"""What `kvshare bench gpu` concludes from figures that are written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvshare.admin import Costs
from kvshare_lab.vllm.client import Answer
from kvshare_lab.vllm.gpu import answers, inter_token, load, profile, ttft
from kvshare_lab.vllm.gpu.inter_token import Decoded
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.sequences import Load, Request, share_figures

COSTS: Costs = {
    "step_s": 0.0,
    "token_s": 0.001,
    "pair_s": 0.0,
    "pass_s": 0.05,
    "reused_s": 0.0,
    "loads": {"memory": {"fixed_s": 0.0, "bytes_per_s": 1e9}},
    "full_s": {},
    "lookup_s": {},
    "embedding_s": {},
    "bytes_per_token": 100_000,
    "num_extra_passes": 1,
    "machine": "a GPU",
    "measured": ["load", "pass", "prefill"],
    "break_even_tokens": 0,
}


def rows(**speedups: float) -> list[dict[str, Any]]:
    """With 10 % changed as given, and slower with 1 %, which must not count."""
    return [
        {
            "tokens": int(name[1:]),
            "changed": [{"share": 0.01, "speedup": 0.1}, {"share": 0.1, "speedup": value}],
        }
        for name, value in speedups.items()
    ]


def test_sharing_pays_from_where_it_always_does() -> None:
    """A shorter length that was faster by chance does not count; nor does any if the longest was not."""
    assert ttft.first_that_pays(rows(t256=1.2, t512=0.9, t1024=1.1, t2048=2.0), 0.1) == 1024
    assert ttft.first_that_pays(rows(t256=1.2, t512=1.3), 0.1) == 256
    assert ttft.first_that_pays(rows(t256=1.2, t512=0.9), 0.1) is None
    assert ttft.first_that_pays(rows(t256=1.2, t512=1.3), 0.01) is None


def test_the_learned_length_is_that_of_the_measured_rates() -> None:
    """50 ms for the pass, 0.81 ms saved a token: 62 tokens. What was not measured gives none."""
    assert ttft.learned(COSTS, 0.1)["learned_tokens"] == 62
    assert ttft.learned({**COSTS, "measured": ["load"]}, 0.1)["learned_tokens"] is None


def test_lengths_double_up_to_the_longest() -> None:
    """Which is measured whatever it is, right after the shortest: the time may not last for all."""
    assert ttft.lengths(32_768) == [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]
    assert ttft.lengths(1000) == [256, 512, 1000]
    assert ttft.lengths(200) == [200]
    assert ttft.order(ttft.lengths(1000)) == [256, 1000, 512]
    assert ttft.order([200]) == [200]


def test_arms_are_compared_with_nothing_else_running() -> None:
    """The gaps of all streams, in milliseconds and over those of `quiet`."""
    gaps = {"quiet": [0.010] * 100, "full": [0.010] * 50 + [0.030] * 50}
    gaps |= {"saves": [0.020] * 100, "loads": [0.010] * 99 + [0.050]}
    rounds = {name: [Decoded(own[:50], 1), Decoded(own[50:], 2)] for name, own in gaps.items()}
    found = inter_token.inter_token_figures(rounds)
    assert found["arrivals"]["loads"] == 3
    assert found["mean_ratio"]["full"] == pytest.approx(2.0)
    assert found["p99_ratio"]["saves"] == pytest.approx(2.0)
    assert found["max_ratio"]["loads"] == pytest.approx(5.0)
    assert found["arms"]["loads"]["p50_ms"] == 10.0


def test_host_waits_are_counted_by_place() -> None:
    """Ours apart, of all in the log; where a package is installed is not published."""
    runner = "/opt/x/site-packages/vllm/v1/worker/gpu/model_runner.py:9: UserWarning:"
    log = "\n".join(
        [
            "(EngineCore pid=7) /opt/x/site-packages/kvshare/vllm_connector/worker/copy_writer.py:33: "
            "UserWarning: called a synchronizing CUDA operation (Triggered internally at Functions.cpp:1.)",
            "(EngineCore pid=7)   rows = rows.to(device)",
            f"{runner} called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)",
            f"{runner} GPU<->CPU sync detected - avoid it",
            "/opt/x/site-packages/kvshare/other.py:1: UserWarning: something else",
        ]
    )
    found = inter_token.counted_syncs(log, 10)
    assert (found["per_step"], found["ours_per_step"]) == (0.3, 0.1)
    assert found["places"] == {
        "vllm/v1/worker/gpu/model_runner.py:9": 2,
        "kvshare/vllm_connector/worker/copy_writer.py:33": 1,
    }
    assert inter_token.counted_syncs("", 0)["per_step"] == 0


@pytest.mark.parametrize(
    ("error", "noise", "foreign", "passed"),
    [
        (0.0, 0.0, 1.2, True),  # float32 on a CPU
        (0.01, 0.0, 1.2, False),
        (0.238, 0.200, 1.51, True),  # bfloat16 on an H100
        (2.9e-4, 1.7e-4, 1.29, True),  # float32 there
        (0.9, 0.2, 1.51, False),
        (0.3, 0.8, 1.51, None),  # another prompt's KV would pass, too
    ],
)
def test_parity_is_judged_by_what_batching_alone_changes(
    error: float, noise: float, foreign: float, passed: bool | None
) -> None:
    """With a margin; and not at all where the noise hides another prompt's KV."""
    figures = {"max_abs_logprob_error": error, "noise": noise, "foreign_kv_error": foreign}
    found = answers.judged_by_noise(figures)
    assert found["passed"] is passed
    assert found["of_noise"] == (pytest.approx(error / noise) if noise else None)


def served(seconds: float, *ttft_s: float, near: float) -> Load:
    """As many requests as times to the first token, of which the first ones are near-duplicates."""
    prompt = unrelated_prompt(np.random.default_rng(0), 4)
    num_near = round(near * len(ttft_s))
    requests = [Request(prompt, 2, is_near=number < num_near) for number in range(len(ttft_s))]
    return Load(requests, [Answer(token_times_s=[each, each + 0.01]) for each in ttft_s], seconds)


def test_a_share_of_near_duplicates_is_compared_with_stock_vllm() -> None:
    """Requests a second and times of each kind of request that there is, shared over plain."""
    both = {"plain": served(4.0, 2.0, 2.0, near=0.5), "shared": served(2.0, 1.0, 3.0, near=0.5)}
    found = share_figures(both)
    assert found["throughput_ratio"] == pytest.approx(2.0)
    assert found["near_ttft_ratio"] == pytest.approx(0.5)
    assert found["unrelated_ttft_ratio"] == pytest.approx(1.5)
    assert found["plain"]["inter_token"]["p50_ms"] == pytest.approx(10.0)
    assert "near_ttft_ratio" not in share_figures({name: served(1.0, 1.0, near=0) for name in both})


def test_rates_of_the_open_loop_follow_from_what_stock_vllm_completes() -> None:
    """Where nothing is shared, the last of the closed loops; none if there was no time for any."""
    closed = [{"plain": {"completed_per_s": [each]}} for each in (9.0, 4.0)]
    assert load.default_rates(closed) == [2.0, 3.6]
    assert load.default_rates([]) == []


def test_a_profile_names_the_top_functions_of_each_thread() -> None:
    """Lines of a function are one; a thread is busy for its share of all samples."""
    samples = "\n".join(
        [
            'thread (0x1): "MainThread";run (engine.py:10);step (engine.py:20) 30',
            'thread (0x1): "MainThread";run (engine.py:10);step (engine.py:25) 10',
            'thread (0x1): "MainThread";run (engine.py:11);poll (zmq.py:5) 10',
            'thread (0x2): "copies";run (threading.py:1);computed_checksum (segment_store.py:7) 150',
            "no stack",
        ]
    )
    found = profile.by_thread(samples, num_samples=200)
    assert list(found) == ['thread (0x2): "copies"', 'thread (0x1): "MainThread"']
    main = found['thread (0x1): "MainThread"']
    assert main["busy"] == 0.25
    assert main["top"] == [
        {"function": "step (engine.py)", "own": 0.8, "total": 0.8},
        {"function": "poll (zmq.py)", "own": 0.2, "total": 0.2},
    ]
