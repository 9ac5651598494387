"""
vLLM as users start it: the model compiled, which is its default. All other tests run it eager.

`make long` runs all of the connector's tests compiled; these are the ones that CI has time for.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from kvshare_lab.demo_model.pairs import near_duplicate_pairs
from kvshare_lab.vllm.ports import free_ports, port_with_next
from kvshare_lab.vllm.servers import Server, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is built for Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU vLLM compiles with g++"),
]

_CONNECTOR_TESTS = Path(__file__).parent / "kvshare" / "vllm_connector"
_COMPILED_TESTS = ("test_parity.py::TestExactness", "test_coexistence.py")
WAIT_S = 180.0  # of a busy machine
_KVSHARE = (sys.executable, "-m", "kvshare.cli.main")


def test_parity_holds_cold_and_from_vllms_compile_cache(tmp_path: Path) -> None:
    """
    One process compiles and stores the result, the next takes it from there; both in two modes.

    vLLM 0.32 cannot load a whole model that it compiled on a CPU: it traces again, and takes the kernels.
    """
    cache = tmp_path / "cache"
    run_compiled(tmp_path, cache)
    compiled = kernels(cache)
    assert compiled
    run_compiled(tmp_path, cache)
    assert kernels(cache) == compiled, "something was compiled again"


def run_compiled(folder: Path, cache: Path) -> None:
    """
    Parity of one model, and the chunked asynchronous case, in a pytest of their own.

    The models must lie where they lay, or vLLM does not find what it has compiled.
    """
    outcome = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "long", f"--basetemp={folder / 'run'}"),
            *("-p", "no:cacheprovider", "--show-capture=no"),
            *(str(_CONNECTOR_TESTS / name) for name in _COMPILED_TESTS),
            *("-k", "compiled-llama] or compiled-chunked-async]"),
        ],
        env={**os.environ, "VLLM_CACHE_ROOT": str(cache)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    assert "6 passed" in outcome.stdout, outcome.stdout[-4000:]


def kernels(cache: Path) -> dict[Path, int]:
    """What was compiled into vLLM's cache, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in cache.glob("torch_compile_cache/**/*.so")}


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Server]:
    """
    The two commands of the README on default flags, with a small model.

    Only what depends on times is set: with this model there is next to none to save, and the machine is busy.
    """
    from kvshare_lab.demo_model.export import export

    port, proxy_port = port_with_next(), free_ports(1)[0]
    config = tmp_path / "config.yaml"
    cost = {"min_saved_s": -3600.0, "min_saved_fraction": 0.0, "measure_at_start": False, "learn": False}
    index = {"search_timeout_s": 60.0, "embed_timeout_s": 60.0}
    config.write_text(yaml.safe_dump({"cost": cost, "sharing": {"max_risk": 1.0}, "index": index}))
    vllm = Server(
        name="vLLM",
        command=[*_KVSHARE, "vllm", str(export(tmp_path / "model")), "--port", str(port)],
        url=f"http://127.0.0.1:{port}",
        log_path=tmp_path / "vllm.log",
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )
    proxy = Server(
        name="the proxy",
        command=[
            *(*_KVSHARE, "serve", "--engine", "vllm", "--vllm-url", vllm.url, "--port", str(proxy_port)),
            *("--config", str(config), "--store", str(tmp_path / "store")),
        ],
        url=f"http://127.0.0.1:{proxy_port}",
        log_path=tmp_path / "proxy.log",
        environment={"HF_HUB_OFFLINE": "1"},
        ready_path="/ready",
    )
    with running([vllm]), running([proxy]):
        yield proxy


def test_the_readmes_commands_share(front: Server) -> None:
    """On default flags a near-duplicate is answered right, for the most part from another prompt's KV."""
    forms = next(near_duplicate_pairs(seed=1, count=1))
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        (model,) = client.models.list()

        def ask(messages: list[dict[str, str]]) -> tuple[str, int, int]:
            reply = client.chat.completions.create(
                model=model.id,
                messages=messages,  # type: ignore[arg-type]  # plain dictionaries
                temperature=0,
                max_tokens=12,
            )
            assert reply.usage is not None
            details = reply.usage.prompt_tokens_details
            num_cached = 0 if details is None else details.cached_tokens or 0
            return (reply.choices[0].message.content or "").strip(), reply.usage.prompt_tokens, num_cached

        assert ask(forms.donor_messages)[2] == 0
        wait_for(front, "kvshare_tree_nodes")
        wait_settled(front)
        answer, num_tokens, num_cached = ask(forms.recipient_messages)
    assert answer == forms.answer
    assert num_cached > 0.4 * num_tokens
    assert wait_for(front, 'kvshare_prompt_tokens_by_source_total{source="kvshare_approx"}') > 0


def wait_for(front: Server, name: str) -> float:
    """The sum of a counter of the proxy, once it is not 0."""
    deadline = time.monotonic() + WAIT_S
    while not (value := count(front, name)):
        assert time.monotonic() < deadline, f"{name}\n{front.log_path.read_text(errors='replace')[-4000:]}"
        time.sleep(0.05)
    return value


def wait_settled(front: Server) -> None:
    """Until all prompts are in the index: in the tree they are a little before."""
    deadline = time.monotonic() + WAIT_S
    while not all(entry["settled"] for row in requests(front) for entry in row["stored"]):
        assert time.monotonic() < deadline, requests(front)
        time.sleep(0.05)


def requests(front: Server) -> list[dict[str, Any]]:
    """What the proxy knows of the latest."""
    with urllib.request.urlopen(f"{front.url}/admin/requests", timeout=WAIT_S) as reply:
        found: list[dict[str, Any]] = json.load(reply)["requests"]
    return found


def count(front: Server, name: str) -> float:
    with urllib.request.urlopen(f"{front.url}/metrics", timeout=WAIT_S) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
