"""
Suites of real clients, each in an environment of its own, against both engines over real sockets.

The servers run the default chat model: `kvshare serve`, and `kvshare serve --engine vllm` before
`kvshare vllm`. `make clients` runs these; the environments lie in `.venv/clients`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvshare.chat_model.prepare import prepare
from kvshare.vllm_protocol.messages import TOKEN_VARIABLE
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.ports import free_ports
from kvshare_lab.vllm.servers import Server, VllmOptions
from tests.environments import environment

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
SUITES = yaml.safe_load((HERE / "environments.yaml").read_text(encoding="utf-8"))
MODEL = "chat"


@dataclass(frozen=True)
class Front:
    """What the clients see."""

    engine: str
    server: Server


@pytest.fixture(scope="module", params=["embedded", "vllm"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Each engine in turn, ready."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "embedded":
        server = embedded(folder)
        with servers.running([server]):
            yield Front("embedded", server)
        return
    if sys.platform != "linux":
        pytest.skip("vLLM's CPU wheel is built for Linux")
    vllm = shared_vllm(folder)
    server = servers.proxy(vllm, folder, token=vllm.environment[TOKEN_VARIABLE], settings={})
    with servers.running([vllm]), servers.running([server]):
        yield Front("vllm", server)


def embedded(folder: Path) -> Server:
    port = free_ports(1)[0]
    own = ["--model", str(prepare()), "--served-name", MODEL, "--port", str(port), "--store", str(folder)]
    return Server(
        name="kvshare serve",
        command=[sys.executable, "-m", "kvshare.cli.main", "serve", *own],
        url=f"http://127.0.0.1:{port}",
        log_path=folder / "serve.log",
        environment={"HF_HUB_OFFLINE": "1"},
        ready_path="/ready",
    )


def shared_vllm(folder: Path) -> Server:
    options = VllmOptions(dtype="float32", max_model_len=4096, enforce_eager=True)
    vllm = servers.shared_vllm(prepare(), folder, options, kv_bytes=1 << 28, token=servers.new_token())
    # What vLLM needs for tools, and so that even a small model's arguments and JSON come to an end.
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--tool-strict-level", "parameter"]
    short = ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    vllm.command = [*vllm.command, "--served-model-name", MODEL, *tools, *short]
    return vllm


@pytest.mark.parametrize("suite", SUITES)
def test_suite(front: Front, suite: str) -> None:
    python = environment(f"clients/{suite}", ["pytest==9.2.0", *SUITES[suite]]) / "python"
    run = subprocess.run(
        [python, "-m", "pytest", "-c", "suite.ini", f"{suite}_suite.py"],
        cwd=HERE / "suites",
        env={
            **os.environ,
            "KVSHARE_URL": front.server.url,
            "KVSHARE_MODEL": MODEL,
            "KVSHARE_ENGINE": front.engine,
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # nothing is fetched
        },
        capture_output=True,
        text=True,
        check=False,
    )
    log = front.server.log_path.read_text(errors="replace")[-4000:]
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-2000:]}\n{log}"
