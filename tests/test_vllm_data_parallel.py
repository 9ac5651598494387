"""
One vLLM with two dense replicas in it: nothing is shared, it says so, and it serves.

Two engines take a minute to start; CI has test_start.py, which knows them by their name, and a taken port.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvshare.bench.random_models import write_model
from kvshare.bench.vllm.servers import VllmOptions, running, shared_vllm

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is built for Linux"),
]


def test_data_parallelism_is_refused_in_words(tmp_path: Path) -> None:
    """Both engines want the same control port, which stops neither; the one that has it says why."""
    model = write_model("small", tmp_path / "model", dtype="float32", max_model_len=256)
    options = VllmOptions(dtype="float32", max_model_len=256, enforce_eager=True)
    vllm = shared_vllm(model, tmp_path, options, kv_bytes=1 << 20, token="secret")
    vllm.command = [*vllm.command, "--data-parallel-size", "2"]
    vllm.environment = {**vllm.environment, "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    with running([vllm]):
        for _ in range(2):
            answer = ask(f"{vllm.url}/v1/completions", {"model": "bench", "prompt": "a b c", "max_tokens": 2})
            assert answer["usage"]["completion_tokens"] == 2
        (refusal,) = ask(f"{vllm.control_url}/info", token="secret")["refusals"]
        assert "data parallelism" in refusal
    log = vllm.log_path.read_text()
    assert log.count("nothing is shared") == 2
    assert log.count("data parallelism in one vLLM is not supported") == 2


def ask(url: str, body: dict[str, Any] | None = None, token: str = "") -> Any:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
