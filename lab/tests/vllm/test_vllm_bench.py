"""
The vLLM benchmarks run through real servers, at a tiny size, and their documents say what they promise.

All share two vLLMs with a small model, as each start takes long; seeds differ, so that no prompt comes twice.
No timing is a limit here. `make long` runs them: a quarter of an hour of processor time, all of it the lab's.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvshare.replay.workloads import generate, write_rows
from kvshare_lab.vllm import (
    bounds,
    burst,
    gpu,
    interference,
    inway,
    load,
    parity,
    session,
    soak,
    stack,
    steady,
    ttft,
    way,
)
from kvshare_lab.vllm.gpu.report import Deadline, Report
from kvshare_lab.vllm.gpu.runner import _PARTS, measure
from kvshare_lab.vllm.sequences import read_prompts
from kvshare_lab.vllm.servers import running
from kvshare_lab.vllm.stack import ALWAYS_SHARE, Stack, pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

_TOKENS = 200
_KV_BYTES = 3072 * 4096  # a few prompts: steady must evict
# What is planned does not depend on how busy the machine is.
_PROXY = {"cost": {**ALWAYS_SHARE["cost"], "learn": False}, "index": {"search_timeout_s": 60.0}}


@pytest.fixture(scope="module")
def both() -> Iterator[Stack]:
    """Two vLLMs whose KV caches are so small that requests are preempted."""
    options = parity.Config(tokens=_TOKENS, eager=True).options
    vllm = replace(options.vllm, is_resettable=True)
    own = replace(options, vllm=vllm, kv_bytes=_KV_BYTES, proxy_settings=_PROXY, can_fail=True)
    with pair(own) as servers:
        yield servers


@pytest.fixture(scope="module")
def servers(both: Stack) -> Iterator[Stack]:
    """The same with a proxy."""
    with running([both.proxy]):
        yield both


async def measured(module: ModuleType, servers: Stack, **options: Any) -> dict[str, Any]:
    """What a benchmark measures; by default with prompts of `_TOKENS` tokens, 5 % changed in 2 places."""
    edits = {"prompt_tokens": _TOKENS, "changed": 0.05, "edits": 2} if module not in (soak, inway) else {}
    return await session.measured(module.measure, servers, module.Config(**{**edits, **options}))


def test_a_document_begins_with_what_was_started(both: Stack) -> None:
    """What every document begins with."""
    document = stack.document("ttft", both.options, ttft.Config())
    assert (document["benchmark"], document["engine"], document["document_version"]) == ("ttft", "vllm", 1)
    assert document["environment"]["vllm"].startswith("vllm")
    assert document["servers"]["vllm"]["dtype"] == "float32"
    assert document["model"]["num_layers"] == 4


async def test_planned_requests_equal_plain_vllm(both: Stack) -> None:
    """The promise of the README; before the proxy starts, which drops what it does not know."""
    config = parity.Config(tokens=_TOKENS, seed=1)
    mode = await session.measured(partial(parity.measure, copies=1), both, config)
    document = parity.summary({"eager": mode}, config)
    assert document["benchmark"] == "parity"
    assert document["max_abs_logprob_error"] <= 1e-4
    assert set(mode["errors"]) >= {"all_placeholders", "scattered", "identity", "prefix", "preempted"}
    assert mode["foreign_kv_error"] > 0.01  # or the written KV would not be what answers
    assert mode["preemptions"] > 0
    assert set(mode["decisions"]["scattered"]) == {"approx"}
    assert set(mode["decisions"]["prefix"]) == {"exact"}


async def test_time_to_first_token_is_measured_in_seven_arms(servers: Stack) -> None:
    """All ratios are there, and the shared arms really shared."""
    document = await measured(ttft, servers, prompt_tokens=300, repeats=1, seed=2)
    shared = {"shared", "ideal", "shared_even", "ideal_even"}
    assert set(document["median_ttft_s"]) == {"full", "full_proxied", "prefix_cache", *shared}
    assert document["decisions"]["approx"] == 4
    assert 0 < document["tokens"]["computed"] < 200
    assert document["tokens"]["equal_computed"] == document["tokens"]["computed"]
    for key in ("speedup", "equal_compute_speedup", "prefix_cache_speedup", "of_equal_compute", "of_bound"):
        assert document[key] > 0
    assert document["even"]["of_bound"] > 0
    assert 0 < document["bound"]["flop_share"] < 1
    assert "front_ms" in document


async def test_the_way_of_a_request_has_every_stage(servers: Stack) -> None:
    """Of a chat through the proxy, which shares; the stages are parts of the time to the first token."""
    config = way.Config(lengths="300", changed=0.05, edits=2, repeats=1, seed=21)
    document = await session.measured(way.measure, servers, config)
    (found,) = document["lengths"].values()
    assert document["decisions"]["approx"] >= 1 + way._WARM_UP  # with those of earlier tests
    assert 200 < found["tokens"] <= 300
    assert {"straight", "given", "through", "added", "render", "shared"} <= found["arms"].keys()
    stages = {name: figures["p50_ms"] for name, figures in found["stages"].items()}
    assert {"body", "tokenize", "plan", "ticket", "engine", "vllm_pass", "vllm_rest"} <= stages.keys()
    passed = sum(value for name, value in stages.items() if not name.startswith("vllm_"))
    assert passed == pytest.approx(found["arms"]["shared"]["p50_ms"], rel=0.01)


async def test_both_arms_answer_the_same_load(servers: Stack) -> None:
    """Every request of every sequence is answered in both, and near ones are shared."""
    document = await measured(
        load, servers, concurrency=2, requests=6, families=1, min_output=2, max_output=4, repeats=1, seed=3
    )
    for arm in ("plain", "shared"):
        assert document["mixed"][arm]["requests"] == 6
        assert document["unrelated"][arm]["requests"] == 3
        assert set(document["mixed"][arm]["ttft"]) == {"all", "near", "unrelated"}
    assert document["decisions"]["approx"] == 3
    assert document["throughput_ratio"] > 0
    assert document["ttft_p50_ratio"] > 0
    assert document["near_ttft_ratio"] > 0
    assert 0 < document["flop_share"] < 1
    assert document["bound"] > 1
    assert document["unrelated"]["shared"]["cpu_s_per_request"][0] > 0


async def test_both_arms_of_one_proxy_are_compared(servers: Stack) -> None:
    """Every kind alone and in a mix, as often with sharing as without it, and the proxy's own hop."""
    found = await measured(inway, servers, tokens="128,200", shares="0.5", repeats=2, requests=4, seed=11)
    cells = {(row["load"], row.get("tokens"), row["kind"], row.get("token")): row for row in found["cells"]}
    alone = {("alone", tokens, kind, None) for tokens in (128, 200) for kind in bounds.KINDS}
    mixed = {
        ("mix 50%", None, kind, token) for kind in ("shared", "unshared") for token in ("first", "whole")
    }
    assert cells.keys() == alone | mixed
    assert {row["requests"] for row in cells.values()} == {2}
    assert cells["alone", 200, "shared", None]["decisions"] == {"approx": 2}
    assert cells["alone", 200, "unshared", None]["decisions"] == {"full": 2}
    assert [row["tokens"] for row in found["hop"]] == [128, 200]
    assert found["passed"] is (not found["missed"])


async def test_an_open_loop_has_both_arms_at_each_rate(servers: Stack) -> None:
    """The same requests at the same times."""
    document = await measured(
        load, servers, rate="2,4", requests=4, families=1, min_output=2, max_output=4, repeats=1, seed=10
    )
    assert [found["rate"] for found in document["open_loop"]] == [2.0, 4.0]
    for found in document["open_loop"]:
        for arm in ("plain", "shared"):
            assert found[arm]["ttft"]["all"]["p95_ms"] >= found[arm]["ttft"]["near"]["p50_ms"] > 0
        assert found["near_ttft_ratio"] > 0


async def test_running_answers_are_timed_while_planned_requests_come(servers: Stack) -> None:
    """Every one that comes shares. What share of the steps that is, a model this small does not show."""
    document = await measured(interference, servers, concurrency=2, tokens=150, every=50, repeats=1, seed=9)
    assert document["arrivals"] == 2
    assert document["decisions"]["approx"] == 4
    assert 0 <= document["affected_steps"] <= 1
    for key in ("itl_p99_ratio", "itl_max_ratio", "planned_ttft_ratio"):
        assert document[key] > 0
    assert document["baseline"]["cached_tokens"] > 0


async def test_a_workload_takes_the_place_of_made_up_prompts(servers: Stack, tmp_path: Path) -> None:
    """Both arms answer as many of its prompts as were asked for, in each repeat the next ones."""
    file = tmp_path / "template.jsonl"
    write_rows(generate("template", num_requests=8, seed=0), file)
    given = read_prompts(file, num_prompts=8, max_tokens=_TOKENS)
    config = load.Config(
        concurrency=1,
        requests=4,
        prompt_tokens=_TOKENS,
        families=1,
        min_output=2,
        max_output=4,
        repeats=2,
        seed=6,
    )
    document = await session.measured(partial(load.measure, given=given), servers, config)
    assert document["workload"] == given.description
    for arm in ("plain", "shared"):
        assert document["mixed"][arm]["requests"] == 8
        assert set(document["mixed"][arm]["ttft"]) == {"all"}
    assert document["decisions"]["approx"] > 0, "forms that differ in their slots"


async def test_all_but_one_of_a_burst_copy(servers: Stack) -> None:
    """From a prompt whose answer is still generated; stock vLLM's prefix cache finds little."""
    document = await measured(burst, servers, concurrency=3, max_tokens=4, repeats=1, seed=8)
    assert document["reused"]["burst"] > 0.4
    assert document["reused"]["warm"] > 0.4
    assert document["reused"]["full"] < 0.2
    assert document["of_warm"] > 0


async def test_a_full_store_evicts_and_stays_within_its_bytes(servers: Stack) -> None:
    """Batches go on being measured while segments are dropped."""
    document = await measured(
        steady, servers, batches=3, recipients=4, strangers=2, families=2, prompt_tokens=300, seed=4
    )
    assert len(document["speedups"]) == 3
    assert all(len(batch["computed"]) == 4 for batch in document["batches"])
    assert document["last3_over_first3"] > 0
    assert document["trend_per_batch"] > -1
    dropped = [batch["num_dropped"] > 0 for batch in document["batches"]]
    assert document["evicts_in_every_batch"] == all(dropped)
    assert document["evicted_segments"] > 0
    assert document["peak_bytes"] <= document["max_bytes"] == _KV_BYTES
    assert document["within_bytes"]


async def test_soaked_answers_are_vllms_own(servers: Stack) -> None:
    """Mixed traffic for some seconds, in which loads fail: nothing wrong, no request failed."""
    document = await measured(
        soak,
        servers,
        minutes=0.15,
        concurrency=4,
        min_prompt=60,
        max_prompt=150,
        output_tokens=16,
        evict_every=10,
        seed=5,
    )
    assert document["passed"], document["failed"]
    assert document["wrong_outputs"] == 0, document["examples"]
    assert document["right_outputs"] > 0
    assert document["failed_loads"] > 0
    assert document["within_bytes"]


async def test_a_report_has_each_part_as_far_as_there_was_time(
    servers: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of edited prompts by length; clients that are cut off, and what does not fit, are named."""
    config = gpu.Config(
        model="small", dtype="float32", prompt_tokens=_TOKENS, changed=0.05, edits=2, repeats=1, seed=12
    )
    config = replace(config, load_tokens=_TOKENS, families=1, answer_tokens=2, concurrency=2, shares="1,0")
    report = Report("CPU_ATTN", ["ttft"], Deadline(600))
    await measure(servers, config, report, needs_proxy=True)
    document = report.to_json()
    (row,) = document["ttft"]["lengths"]
    assert row["prefix"]["reused"] > 0.4
    assert [each["reused"] > 0.4 for each in row["changed"]] == [True] * 4
    from_blocks = {each["donor"]: each["from_blocks"] for each in row["changed"]}
    assert from_blocks["device"] > 0.9 > 0.1 > from_blocks["host"]
    assert not document["not_measured"]
    endless = replace(config, requests=5000, shares="1")
    monkeypatch.setitem(_PARTS, "load", _PARTS["load"]._replace(least_s=0))
    report = Report("CPU_ATTN", ["load", "soak"], Deadline(4))
    await measure(servers, endless, report, needs_proxy=True)
    document = report.to_json()
    assert (document["load"], document["soak"]) == (None, None)
    assert document["not_measured"]["load"].startswith("cut off after 4 s")
    assert document["not_measured"]["soak"] == "0 s of 4 s were left, expected 10 s"
    assert document["passed"]


async def test_answers_are_judged_by_those_of_requests_that_share_nothing(servers: Stack) -> None:
    """A limit that the noise gives takes the place of equality, and the report has both errors."""
    options = {"minutes": 0.02, "concurrency": 2, "min_prompt": 60, "max_prompt": 150, "output_tokens": 16}
    document = await measured(soak, servers, seed=13, of_noise=2.5, **options)
    assert document["passed"]
    assert document["error"] < 1e-3
    assert document["noise"] < 1e-3


async def test_a_soak_without_a_failed_load_has_not_passed(
    servers: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a minute were over; the document says what is missing."""
    monkeypatch.setattr(soak, "failing_loads", nullcontext)
    monkeypatch.setattr(soak, "_MUST_FAIL_MINUTES", 0.0)
    document = await measured(
        soak, servers, minutes=0.02, concurrency=2, min_prompt=60, max_prompt=150, output_tokens=16, seed=11
    )
    assert (document["passed"], document["failed_loads"]) == (False, 0)
    assert document["failed"] == {"no load has failed": 1}
