"""`kvshare bench gpu` starts and ends servers, and leaves a document whatever happens."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshare.cli.views import draw
from kvshare.errors import ConfigError, EngineError
from kvshare_lab.bench.bound import copy_rates
from kvshare_lab.cli import view
from kvshare_lab.vllm import servers, stack
from kvshare_lab.vllm.gpu import runner
from kvshare_lab.vllm.gpu.config import PARTS, Config
from kvshare_lab.vllm.gpu.report import Deadline, Report
from kvshare_lab.vllm.servers import Server

INSIDE = ("verify", "write", "pass", "save", "first_token")  # stages of the connector


@pytest.fixture
def quick_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = copy_rates(num_bytes=1 << 20)
    monkeypatch.setattr(runner, "copy_rates", lambda: rates)


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


@pytest.mark.parametrize(("memory", "one_by_one"), [(None, False), (0.4, True)])
def test_two_vllms_on_one_device_start_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, memory: float | None, one_by_one: bool
) -> None:
    """Each measures the memory that is free, which must not change meanwhile."""
    events: list[str] = []
    monkeypatch.setattr(Server, "start", lambda self: events.append(f"start {self.name}"))
    monkeypatch.setattr(Server, "wait_ready", lambda self, _: events.append(f"ready {self.name}"))
    options = Config(model="some/model").options
    with stack.pair(replace(options, vllm=replace(options.vllm, device_memory=memory))):
        verbs = [event.split()[0] for event in events]
    assert verbs == (["start", "ready"] * 2 if one_by_one else ["start", "start", "ready", "ready"])


def test_a_backend_that_does_not_start_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick_copies: None
) -> None:
    """It is in the report with what was said, all parts null; the report can be read on a terminal, too."""

    def failing(*_: Any, **__: Any) -> Any:
        raise EngineError("plain vLLM ended while starting: no such backend")

    monkeypatch.setattr(runner, "pair", failing)
    document = runner.run(Config(model="small", backends="ONE,TWO"))
    assert [each["backend"] for each in document["backends"]] == ["ONE", "TWO"]
    assert (document["passed"], document["finished"]) == (False, True)
    for each in document["backends"]:
        assert all(each[part] is None for part in PARTS)
        assert set(each["not_measured"]) == set(PARTS)
    draw(view.bench, document)
    shown = capsys.readouterr().out
    assert "no such backend" in shown
    assert "FAILED" in shown


def test_servers_that_are_not_ready_in_time_have_not_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_copies: None
) -> None:
    """They get what is left of the time, and are stopped when it is over."""

    @contextmanager
    def never_ready(*_: Any, start_s: float) -> Iterator[None]:
        command = [sys.executable, "-c", "import time; time.sleep(100)"]
        slow = Server("plain vLLM", command, "http://127.0.0.1:9", tmp_path / "log")
        with servers.running([slow], start_s=start_s):
            yield

    monkeypatch.setattr(runner, "pair", never_ready)
    document = runner.run(Config(model="small", seconds=3))
    (backend,) = document["backends"]
    assert (document["passed"], document["finished"]) == (False, True)
    assert "plain vLLM was not ready after" in backend["not_measured"]["ttft"]


async def test_where_nothing_is_shared_the_other_parts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the connector's own words in the self-test; that is a failure of the backend."""

    async def unshared(*_: object) -> dict[str, Any]:
        return {"passed": False, "refusals": ["partial attention does not give the KV of a full prefill"]}

    part = runner._PARTS["self_test"]._replace(measure=unshared)
    monkeypatch.setitem(runner._PARTS, "self_test", part)
    report = Report("SOME_ATTN", PARTS, Deadline(600))
    await runner.measure(None, Config(), report, needs_proxy=False)  # type: ignore[arg-type]  # no server is asked
    document = report.to_json()
    assert document["passed"] is False
    assert document["self_test"]["refusals"]
    assert set(document["not_measured"]) == set(PARTS[1:])


def test_a_file_that_cannot_be_written_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Not after the first part."""
    with pytest.raises(ConfigError, match="--out"):
        runner.run(Config(model="small", out=tmp_path / "missing" / "gpu.json"))


# The command, with two servers that compute nothing in place of vLLM, and a first part that ends at once.
ENDLESS = """
import asyncio, sys
from contextlib import contextmanager
from pathlib import Path
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.gpu import runner
from kvshare_lab.vllm.ports import free_ports

folder = Path(sys.argv[1])

@contextmanager
def pair(options, *, start_s):
    ports = free_ports(2)
    commands = [[sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"] for port in ports]
    both = [
        servers.Server(f"{port}", command, f"http://127.0.0.1:{port}", folder / f"{port}", ready_path="/")
        for port, command in zip(ports, commands)
    ]
    with servers.running(both, start_s=start_s):
        print(*(each.session_id for each in both), file=sys.stderr, flush=True)
        yield None

async def self_test(*_):
    return {"passed": True}

async def parity(servers, config, progress):
    progress.keep({"rows": [1]})
    await asyncio.sleep(600)

runner.pair, runner.copy_rates = pair, lambda: {}
for measure in (self_test, parity):
    name = measure.__name__
    runner._PARTS[name] = runner._PARTS[name]._replace(measure=measure)
sys.argv = ["kvshare", "bench", "gpu", "--model", "random-tiny", "--out", sys.argv[2], "--json"]
from kvshare.cli.main import main
main()
"""


def wait_for_rows(out: Path, process: subprocess.Popen[str]) -> None:
    """Until the second part has a row in the document. Whenever it is read, it is whole."""
    deadline = time.monotonic() + 60
    while not (out.exists() and any(each["parity"] for each in json.loads(out.read_text())["backends"])):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no row was written"
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_its_document(tmp_path: Path, how: signal.Signals) -> None:
    """Valid, with what was measured; unless it is killed, it also prints it and ends its servers."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-c", ENDLESS, str(tmp_path), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_rows(out, process)
            process.send_signal(how)
            printed, said = process.communicate(timeout=60)
        finally:
            process.kill()
    server_ids = next(list(map(int, line.split())) for line in said.splitlines() if line[:1].isdigit())
    document = json.loads(out.read_text())
    assert document["finished"] is False
    (backend,) = document["backends"]
    assert backend["self_test"] == {"passed": True}
    assert backend["parity"] == {"rows": [1]}
    assert set(backend["not_measured"]) >= set(PARTS[2:])
    assert '"passed": true' in said, "each part was noted"
    if how is signal.SIGKILL:
        for server_id in server_ids:
            os.kill(server_id, signal.SIGKILL)
        return
    assert process.returncode == 1
    assert json.loads(printed)["ended_by"] == document["ended_by"] is not None
    for server_id in server_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(server_id, 0)


TINY = Config(
    model="random-tiny",
    eager=True,
    prompt_tokens=300,
    changed=0.05,
    edits=2,
    streams=2,
    output_tokens=24,
    repeats=1,
    minutes=0.15,
    load_tokens=200,
    answer_tokens=4,
    concurrency=2,
    requests=4,
    families=1,
    seconds=1500,
)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_report_on_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str
) -> None:
    """Every part is measured, or says why not; what can be judged is right. No timing is a limit."""
    config = replace(TINY, dtype=dtype, out=tmp_path / "gpu.json")
    document = runner.run(config)
    assert document["passed"], document
    assert document["finished"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == json.loads(json.dumps(document)) == document
    assert document["copy_bytes_per_s"]["host_to_host"] > 0
    assert document["piece_bytes_per_s"] is None or torch.cuda.is_available()
    (backend,) = document["backends"]
    measured = {part for part in PARTS if backend[part] is not None}
    assert measured | set(backend["not_measured"]) >= set(PARTS)
    assert measured >= {"self_test", "parity", "ttft", "load", "inter_token", "soak"}
    assert backend["parity"]["foreign_kv_error"] > 0.01
    assert [row["tokens"] for row in backend["ttft"]["lengths"]] == [256, 300]
    for row in backend["ttft"]["lengths"]:
        assert [(each["share"], each["donor"]) for each in row["changed"]] == [
            *((0.01, "device"), (0.01, "host")),
            *((0.05, "device"), (0.05, "host")),
        ]
        for each in row["changed"]:
            assert each["reused"] > 0.3
            inside = {name for name in each["stage_ms"] if name.startswith("vllm_")}
            assert inside - {"vllm_blocks"} == {f"vllm_{name}" for name in INSIDE}
            assert {"plan", "engine"} <= set(each["stage_ms"])
    assert [row["near"] for row in backend["load"]["closed_loop"]] == [1, 0.5, 0]
    assert len(backend["load"]["open_loop"]) == 2
    assert backend["load"]["decisions"]["approx"] > 0
    assert min(backend["inter_token"]["arrivals"][name] for name in ("full", "saves", "loads")) > 0
    assert backend["soak"]["right_outputs"] > 0
    assert backend["soak"]["failed_loads"] > 0
    draw(view.bench, document)
    assert "passed" in capsys.readouterr().out
