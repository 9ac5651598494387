"""`kvshare bench`: its commands, and what they pass on."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields

import pytest

from kvshare_lab.cli import bench
from tests.kvshare.cli.conftest import Cli

BENCHES = [
    "parity",
    "ttft",
    "plan",
    "index",
    "replay",
    "fidelity",
    "papers",
    "proxy",
]
VLLM_BENCHES = ["parity", "ttft", "load", "steady", "soak", "interference"]


def test_bench_lists_its_commands(cli: Cli) -> None:
    """`kvshare bench --help` names what can be measured."""
    outcome = cli("bench", "--help")
    assert outcome.code == 0
    for name in {*BENCHES, *VLLM_BENCHES}:
        assert f"  {name} " in outcome.stdout


def check_options(name: str, engine: str) -> None:
    """A command's options for an engine are the arguments of its benchmark: no default is written twice."""
    command = next(each for each in bench.BENCHMARKS if each.name == name)
    module = importlib.import_module(bench.module_of(command, engine, {}))
    offered = {option.name for option in command.options}
    if len(command.engines) == 2:
        offered -= {"model", "family"} if engine == "vllm" else {"threads", "dtype", "eager"}
    if engine == "vllm":
        assert offered <= {field.name for field in fields(module.Config)}
        return
    assert offered == set(inspect.signature(module.run).parameters)


@pytest.mark.parametrize("name", BENCHES)
def test_bench_passes_what_a_benchmark_takes(name: str) -> None:
    """Those that run in this process."""
    check_options(name, "embedded")


@pytest.mark.parametrize("name", VLLM_BENCHES)
def test_bench_passes_what_a_benchmark_of_vllm_takes(name: str) -> None:
    """The same for those that start real servers."""
    check_options(name, "vllm")


@pytest.mark.parametrize(
    "command",
    [
        ("ttft", "--dtype", "float32"),
        ("parity", "--threads", "1"),
        ("ttft", "--engine", "vllm", "--model", "default"),
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
