"""
One vLLM with two dense ranks in it, each a replica of the proxy: a request goes to the rank of its donor.

Two engines and two API servers, vLLM's default for two ranks, take most of a minute to start.
"""

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvshare.cli.check import CheckState
from kvshare.cli.doctor import run_vllm_checks
from kvshare.vllm_protocol.messages import TOKEN_VARIABLE
from kvshare_lab.bench.random_models import write_model
from kvshare_lab.vllm.prompts import near_duplicate, unrelated_prompt
from kvshare_lab.vllm.servers import Server, VllmOptions, proxy, running, shared_vllm
from kvshare_lab.vllm.stack import ALWAYS_SHARE

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is built for Linux"),
]
_RANKS = 2


def test_each_rank_is_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keep prompts of their own, and near-duplicates find the rank of their donor, whichever it is."""
    vllm = two_ranks(tmp_path)
    front = proxy(vllm, tmp_path, token="secret", settings=ALWAYS_SHARE, data_parallel_size=_RANKS)
    rng = np.random.default_rng(0)
    donors = [unrelated_prompt(rng, 200) for _ in range(4)]
    with running([vllm]), running([front]):
        ranks = [rank_info(vllm, rank) for rank in range(_RANKS)]
        assert [info["data_parallel_rank"] for info in ranks] == [0, 1]
        assert [info["data_parallel_size"] for info in ranks] == [_RANKS, _RANKS]
        assert [info["refusals"] for info in ranks] == [[], []]
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        checks = run_vllm_checks(vllm.url, vllm.control_url, _RANKS)
        assert {check.state for check in checks} == {CheckState.OK}, checks
        for number, donor in enumerate(donors, start=1):
            complete(front, donor)
            wait_until(partial(has_prompts, front, number))
        held = [rank_info(vllm, rank)["num_segments"] for rank in range(_RANKS)]
        assert all(held), "requests take turns"
        for donor in donors:
            usage = complete(front, near_duplicate(rng, donor, changed=0.05, edits=2))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 100
        finished = [
            event for rank in range(_RANKS) for event in journal(vllm, rank) if event["kind"] == "finished"
        ]
        decisions = [event["decision"] for event in finished]
        assert (decisions.count("approx"), decisions.count("full")) == (len(donors), len(donors))
        assert not any(event["reason"] for event in finished)


def two_ranks(folder: Path) -> Server:
    """As `kvshare vllm --data-parallel-size 2` starts it, the control servers on two ports in a row."""
    model = write_model("small", folder / "model", dtype="float32", max_model_len=512)
    options = VllmOptions(dtype="float32", max_model_len=512, enforce_eager=True)
    vllm = shared_vllm(model, folder, options, kv_bytes=1 << 26, token="secret")
    vllm.command = [*vllm.command, "-dp", str(_RANKS)]
    vllm.environment = {**vllm.environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return vllm


def rank_info(vllm: Server, rank: int) -> dict[str, Any]:
    info: dict[str, Any] = ask(control_url(vllm, rank) + "/info")
    return info


def journal(vllm: Server, rank: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = ask(control_url(vllm, rank) + "/journal?after=0&wait_s=0")["events"]
    return events


def control_url(vllm: Server, rank: int) -> str:
    assert vllm.control_url is not None
    host, _, port = vllm.control_url.rpartition(":")
    return f"{host}:{int(port) + rank}"


def stats(front: Server) -> dict[str, Any]:
    totals: dict[str, Any] = ask(f"{front.url}/admin/stats")["totals"]
    return totals


def has_prompts(front: Server, number: int) -> bool:
    return bool(stats(front)["num_nodes"] >= number)


def complete(front: Server, prompt: NDArray[np.int32]) -> dict[str, Any]:
    body = {
        "model": "bench",
        "prompt": prompt.tolist(),
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer: dict[str, Any] = ask(f"{front.url}/v1/completions", body)
    return answer


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer secret"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
