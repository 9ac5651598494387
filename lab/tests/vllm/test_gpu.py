"""`kvshare bench gpu`: what it concludes, without a server, and one run on the CPU with a tiny model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshare.cli import views
from kvshare.errors import ConfigError, EngineError
from kvshare_lab.bench.bound import copy_rates
from kvshare_lab.bench.random_models import LLAMAS
from kvshare_lab.vllm import gpu, gpu_parts, stack
from kvshare_lab.vllm.gpu_parts import Decoded
from kvshare_lab.vllm.servers import Server

COSTS = {
    "prefill_tokens_per_s": 1000.0,
    "load_bytes_per_s": 1e9,
    "lookup_s": 0.01,
    "bytes_per_token": 100_000,
    "context_share": 0.0,
    "pass_s": 0.05,
    "num_extra_passes": 1,
    "measured": ["load", "prefill"],
    "break_even_tokens": 0,
}


def rows(**speedups: float) -> list[dict[str, float]]:
    return [{"tokens": int(name[1:]), "speedup": value} for name, value in speedups.items()]


def test_sharing_pays_from_where_it_always_does() -> None:
    """A shorter length that was faster by chance does not count; nor does any if the longest was not."""
    assert gpu_parts.first_that_pays(rows(t128=1.2, t256=0.9, t512=1.1, t1024=2.0)) == 512
    assert gpu_parts.first_that_pays(rows(t128=1.2, t256=1.3)) == 128
    assert gpu_parts.first_that_pays(rows(t128=1.2, t256=0.9)) is None


def test_the_learned_length_is_that_of_the_measured_rates() -> None:
    """50 ms for the pass, 0.81 ms saved a token: 62 tokens. What was not measured gives none."""
    assert gpu_parts.learned(COSTS, 0.1)["learned_tokens"] == 62
    assert gpu_parts.learned({**COSTS, "measured": ["load"]}, 0.1)["learned_tokens"] is None


def test_lengths_double_up_to_the_longest() -> None:
    """Which is measured whatever it is."""
    assert gpu_parts.lengths(1000) == [128, 256, 512, 1000]
    assert gpu_parts.lengths(512) == [128, 256, 512]


def test_arms_are_compared_with_nothing_else_running() -> None:
    """The gaps of all streams, in milliseconds and over those of `quiet`."""
    gaps = {"quiet": [0.010] * 100, "full": [0.010] * 50 + [0.030] * 50}
    gaps |= {"saves": [0.020] * 100, "loads": [0.010] * 99 + [0.050]}
    rounds = {name: [Decoded(own[:50], 1), Decoded(own[50:], 2)] for name, own in gaps.items()}
    found = gpu_parts.inter_token_figures(rounds)
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
    found = gpu_parts.counted_syncs(log, 10)
    assert (found["per_step"], found["ours_per_step"]) == (0.3, 0.1)
    assert found["places"] == {
        "vllm/v1/worker/gpu/model_runner.py:9": 2,
        "kvshare/vllm_connector/worker/copy_writer.py:33": 1,
    }
    assert gpu_parts.counted_syncs("", 0)["per_step"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_only_host_copies_have_a_rate() -> None:
    """The others are there, and null."""
    found = copy_rates(num_bytes=1 << 20)
    rate = found["host_to_host"]
    assert rate is not None
    assert rate > 0
    assert all(
        found[f"{way}_{how}"] is None for way in ("to_device", "to_host") for how in ("pinned", "pageable")
    )
    assert gpu.platform_backends() == ["CPU_ATTN"]


def test_no_two_parts_draw_the_same_prompts() -> None:
    """What one part stored must not be met by another that takes it for unseen."""
    configs = [gpu.Config(seed=seed) for seed in range(3)]
    seeds = [
        part.seed
        for config in configs
        for part in (config.parity, config.part(1), config.part(2), config.soak)
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_cache_holds_what_is_timed() -> None:
    """Streams must not be preempted while they are timed; and every part fits the model's length."""
    config = gpu.Config(prompt_tokens=2000, streams=8, output_tokens=128)
    assert config.cache_tokens > 8 * (gpu_parts.STREAM_PROMPT + 128) + 2 * 2000
    assert config.max_model_len > max(2000, config.soak.max_model_len, config.parity.tokens)
    options = gpu.stack_options(config, "SOME_ATTN", checks_syncs=True).vllm
    assert options.arguments[options.arguments.index("--attention-backend") + 1] == "SOME_ATTN"
    assert options.environment["VLLM_GPU_SYNC_CHECK"] == "warn"


@pytest.mark.parametrize(("memory", "groups"), [(None, [2]), (0.4, [1, 1])])
def test_two_vllms_on_one_device_start_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, memory: float | None, groups: list[int]
) -> None:
    """Each measures the memory that is free, which must not change meanwhile."""
    started = []

    @contextmanager
    def running(group: Sequence[Server]) -> Iterator[None]:
        started.append(len(group))
        yield

    monkeypatch.setattr("kvshare_lab.vllm.servers.running", running)
    options = gpu.stack_options(gpu.Config(model="some/model"), "SOME_ATTN")
    with stack.pair(replace(options, vllm=replace(options.vllm, device_memory=memory))):
        assert started == groups


def test_backends_may_be_chosen() -> None:
    """By their names; none at all is wrong usage."""
    assert gpu.Config(backends="TRITON_ATTN, FLASH_ATTN").names == ["TRITON_ATTN", "FLASH_ATTN"]
    with pytest.raises(ConfigError, match="--backends"):
        gpu.run(gpu.Config(backends=","))


def test_a_model_of_a_folder_is_published_by_its_name() -> None:
    """Where it lies is nobody's business."""
    options = gpu.stack_options(gpu.Config(model="/somewhere/of/mine/qwen"), "CPU_ATTN")
    assert options.to_json()["model"] == "qwen"
    assert "/somewhere" not in json.dumps(gpu.Config(model="/somewhere/of/mine/qwen").to_json())
    assert "qwen" not in LLAMAS


def test_a_backend_that_does_not_start_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in the report with what was said, all parts null; the report can be read on a terminal, too."""

    def failing(*_: Any, **__: Any) -> Any:
        raise EngineError("plain vLLM ended while starting: no such backend")

    monkeypatch.setattr(gpu, "pair", failing)
    rates = copy_rates(num_bytes=1 << 20)
    monkeypatch.setattr(gpu, "copy_rates", lambda: rates)
    document = gpu.run(gpu.Config(model="small", backends="ONE,TWO"))
    assert [each["backend"] for each in document["backends"]] == ["ONE", "TWO"]
    assert document["passed"] is False
    for each in document["backends"]:
        assert all(each[part] is None for part in gpu.PARTS)
        assert set(each["not_measured"]) == set(gpu.PARTS)
    views.draw("bench", document)
    shown = capsys.readouterr().out
    assert "no such backend" in shown
    assert "FAILED" in shown


async def test_where_nothing_is_shared_the_other_parts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the connector's own words in the self-test; that is a failure of the backend."""

    async def unshared(*_: object) -> dict[str, Any]:
        return {"passed": False, "refusals": ["partial attention does not give the KV of a full prefill"]}

    monkeypatch.setattr(gpu, "measured", unshared)
    report = gpu.Report("SOME_ATTN")
    await gpu.measure(None, gpu.Config(), report)  # type: ignore[arg-type]  # no server is asked
    document = report.to_json()
    assert document["passed"] is False
    assert document["self_test"]["refusals"]
    assert set(document["not_measured"]) == set(gpu.PARTS[1:])


async def test_a_part_that_fails_costs_the_others_nothing() -> None:
    """What was said stands where its figures would."""

    async def failing() -> dict[str, Any]:
        raise EngineError("the connection broke")

    async def measured() -> dict[str, Any]:
        return {"passed": True}

    report = gpu.Report("SOME_ATTN")
    await report.add("parity", failing())
    await report.add("soak", measured())
    document = report.to_json()
    assert (document["parity"], document["soak"]) == (None, {"passed": True})
    assert document["not_measured"] == {"parity": "the connection broke"}
    assert document["passed"] is False


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_whole_report_on_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every part is measured, or says why not; what can be judged is right. No timing is a limit."""
    config = gpu.Config(
        model="small",
        dtype="float32",
        eager=True,
        prompt_tokens=300,
        changed=0.05,
        edits=2,
        streams=2,
        output_tokens=24,
        repeats=1,
        minutes=0.15,
    )
    document = gpu.run(config)
    assert document["passed"], document
    assert json.loads(json.dumps(document)) == document
    assert document["copy_bytes_per_s"]["host_to_host"] > 0
    for backend in document["backends"]:
        measured = {part for part in gpu.PARTS if backend[part] is not None}
        assert measured | set(backend["not_measured"]) == set(gpu.PARTS)
        assert measured >= {"self_test", "parity", "break_even", "inter_token", "soak"}
        assert backend["parity"]["foreign_kv_error"] > 0.01
        assert [row["tokens"] for row in backend["break_even"]["lengths"]] == [128, 256, 300]
        for row in backend["break_even"]["lengths"]:
            assert row["reused"] > 0.3
            assert set(row["stage_ms"]) == {"verify", "write", "pass", "save"}
        assert min(backend["inter_token"]["arrivals"][name] for name in ("full", "saves", "loads")) > 0
        assert backend["soak"]["right_outputs"] > 0
        assert backend["soak"]["failed_loads"] > 0
    views.draw("bench", document)
    assert "passed" in capsys.readouterr().out
