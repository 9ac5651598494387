"""The wheel of this checkout, installed without extras into a new environment: a proxy in front of vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import unsettled
from tests.fake_vllm import MODEL, FakeVllm, running_vllm

ROOT = Path(__file__).parents[1]
PACKAGES = {"kvshare", "delta_tree", "vector_index", "proxy"}
OF_EXTRAS = {"torch", "transformers", "sentence-transformers", "pyarrow", "matplotlib", "fonttools", "scipy"}
START_S = 180

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment with KVShare's wheel and what the wheel asks for."""

    python: Path
    wheel: Path

    @property
    def kvshare(self) -> Path:
        return self.python.with_name("kvshare")

    @property
    def distributions(self) -> set[str]:
        """Names of what is installed, in lower case."""
        code = "import importlib.metadata as m; print(*(each.name.lower() for each in m.distributions()))"
        return set(subprocess.check_output([self.python, "-c", code], text=True).split())

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """`kvshare` with these arguments, to its end."""
        command = [str(self.kvshare), *map(str, arguments)]
        return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=START_S)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("smallest")
    _pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("kvshare-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    quickly = ("--no-compile", "--constraint", ROOT / "constraints.txt")  # most of it is never imported
    _pip(sys.executable, "--python", python, "install", *quickly, wheel)
    return Installation(python, wheel)


def _pip(python: object, *arguments: object) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run([str(each) for each in command], env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    """The caller's, without what would let the new environment see this checkout or its settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("KVSHARE_")
    }


def test_the_wheel_has_the_four_packages_and_their_types(installation: Installation) -> None:
    """No tests and no scripts; config.yaml and the dashboard's files lie beside the code that reads them."""
    names = zipfile.ZipFile(installation.wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} | {"kvshare/config.yaml"} <= set(names)
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "proxy/dashboard/static").iterdir()}
    assert pages
    assert pages <= set(names)


def test_nothing_of_an_extra_is_installed(installation: Installation) -> None:
    """Neither torch nor tables nor plots nor their fonts, where vLLM does not bring them."""
    installed = installation.distributions
    assert {"kvshare", "aiohttp", "numpy"} <= installed
    assert not OF_EXTRAS & installed


async def test_a_proxy_answers_and_plans(installation: Installation, tmp_path: Path) -> None:
    """The second of two chats about one text gets a plan whose copies vLLM then has."""
    async with running_vllm() as vllm, _proxy(installation, vllm, tmp_path) as url:
        async with aiohttp.ClientSession(url) as http:
            first, _ = await _chat(http, "Rome")
            await _stored(http)
            answer, plan = await _chat(http, "Reykjavik")
        assert first == answer == vllm.behaviour.answer
        assert plan == "approx"
        assert sum(copy.length for copy in vllm.tickets[-1].copies) > 500
    log = (tmp_path / "stderr").read_text()
    assert "pip install 'kvshare[embeddings]'" in log
    assert "Traceback" not in log


@asynccontextmanager
async def _proxy(installation: Installation, vllm: FakeVllm, folder: Path) -> AsyncIterator[str]:
    """
    The URL of `kvshare serve --engine vllm`, with the default settings; but any plan is made, as a vLLM that
    computes nothing may be faster than all of them, and however busy the machine is.
    """
    (folder / "config.yaml").write_text(
        "{cost: {min_saved_s: -3600.0, min_saved_fraction: 0.0, measure_at_start: false, learn: false}, "
        "sharing: {max_risk: 1.0}, index: {search_timeout_s: 60.0}}"
    )
    urls = ["--vllm-url", vllm.url, "--vllm-control-url", vllm.control_url]
    where = ["--port", "0", "--store", str(folder), "--config", str(folder / "config.yaml")]
    command = ["serve", "--engine", "vllm", *urls, *where, "--format", "json"]
    with (folder / "stderr").open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            installation.kvshare, *command, env=_environment(), stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                ready = await process.stdout.readuntil(b"\n}")
            yield json.loads(ready)["url"]
        finally:
            process.terminate()
            await process.wait()


async def _chat(http: aiohttp.ClientSession, place: str) -> tuple[str, str]:
    """The answer to a question about one text, and what was decided about the prompt."""
    text = f"Report of {place}. " + " ".join(f"Paragraph {number} says the same." for number in range(40))
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True}
    async with http.post("/v1/chat/completions", json=body) as response:
        lines = (await response.text()).splitlines()
        assert response.status == 200, lines
        decision = response.headers["X-KVShare-Decision"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks), decision


async def _stored(http: aiohttp.ClientSession) -> None:
    """Wait until the first prompt is stored and in the index: that comes after its answer."""
    async with asyncio.timeout(START_S):
        while True:
            async with http.get("/admin/requests") as response:
                if not unsettled((await response.json())["requests"]):
                    return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["serve"], "embedded"),
        (["fetch-model"], "embedded"),
        (["verify", "demo"], "embedded"),
        (["replay", "log.jsonl"], "replay"),
        (["replay", "diff", "a", "b"], "replay"),
    ],
)
def test_a_command_of_an_extra_names_it(
    installation: Installation, tmp_path: Path, command: list[str], extra: str
) -> None:
    """One line on stderr, exit code 2, no traceback."""
    outcome = installation.run(*command)
    assert outcome.returncode == 2
    assert f"pip install 'kvshare[{extra}]'" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["bench", "parity"], ["bench", "--help"], ["calibrate"]])
def test_a_command_of_the_lab_names_it(installation: Installation, command: list[str]) -> None:
    """The same: the lab is another distribution."""
    outcome = installation.run(*command)
    assert outcome.returncode == 2
    assert "kvshare-lab, which is not installed: pip install ./lab" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_commands_of_the_base_work(installation: Installation, tmp_path: Path) -> None:
    """Help, versions, a made-up workload, and a doctor who says what the embedded engine lacks."""
    assert installation.run("--help").returncode == 0
    assert installation.run("version").returncode == 0
    made = installation.run("workload", "template", "-n", "3", "--out", tmp_path / "made.jsonl")
    assert made.returncode == 0, made.stderr
    doctor = installation.run("doctor", "--format", "json")
    assert doctor.returncode == 1, doctor.stderr
    remedies = {check["name"]: check["remedy"] for check in json.loads(doctor.stdout)["checks"]}
    assert "kvshare[embedded]" in remedies["libraries"]
    assert "kvshare[embeddings]" in remedies["embedder"]
