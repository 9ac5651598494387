"""
`kvshare bench ...`: the commands behind the project's published figures. bench.toml has their options.

In this process a command calls `run(**options)` of `kvshare_lab.bench.<name>` or of its `module`, with vLLM
`run(Config(**options))` of `kvshare_lab.vllm.<name>`. It passes only options that were given: those functions
have the defaults. A result with `"passed": false` ends with exit code 1. In a git checkout a result carries
its `commit`.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, iscoroutine, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from kvshare.cli.options import Format, OutputFormat, described, parameter
from kvshare.cli.output import ExitCode, show
from kvshare.cli.plugins import LAB
from kvshare_lab.checkout import checkout_commit
from kvshare_lab.vllm.termination import ending_on_sigterm

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help=LAB["bench"],  # as the product lists it
)

EMBEDDED, VLLM = "embedded", "vllm"
_JSON = parameter("as_json", type="flag", help="The same as --format json.", flags=["--json"], default=False)
_FORMAT = Parameter("output_format", Parameter.KEYWORD_ONLY, default=OutputFormat.TERMINAL, annotation=Format)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """
    A command. `options`: without those that all commands have. `owners`: the engines of options that only one
    has, by their names. `engines`: the default one first. `module`: what runs in this process.
    """

    name: str
    help: str
    options: tuple[Parameter, ...]
    owners: Mapping[str, str]
    engines: tuple[str, ...]
    module: str


def _benchmarks() -> Iterator[Benchmark]:
    document = described(Path(__file__).with_suffix(".toml"))
    shared = document["options"]
    for name, command in document["commands"].items():
        described_options = [
            {"name": each, **shared[each]} if isinstance(each, str) else dict(each)
            for each in command["options"]
        ]
        owners = {each["name"]: each.pop("engine") for each in described_options if "engine" in each}
        options = tuple(parameter(**each) for each in described_options)
        engines = tuple(command.get("engines", [EMBEDDED]))
        module = command.get("module", f"kvshare_lab.bench.{name}")
        yield Benchmark(name, command["help"], options, owners, engines, module)


BENCHMARKS = tuple(_benchmarks())


def _command(benchmark: Benchmark) -> Callable[..., None]:
    """A function with the benchmark's options as its parameters, from which Typer makes a command."""

    def command(**options: Any) -> None:
        as_json, output_format = options.pop("as_json"), options.pop("output_format")
        engine = options.pop("engine", EMBEDDED)
        given = {name: value for name, value in options.items() if value is not None}
        chosen = module_of(benchmark, engine, given)
        module = importlib.import_module(chosen)
        commit = checkout_commit()
        with ending_on_sigterm():  # the servers that it has started end, too
            document = (
                module.run(module.Config(**given)) if engine == VLLM else _run(benchmark, module, given)
            )
        if commit is not None:
            document["commit"] = commit
        show("bench", document, OutputFormat.JSON if as_json else output_format)
        if document.get("passed") is False:
            raise typer.Exit(ExitCode.FAILED)

    engines, options = benchmark.engines, list(benchmark.options)
    if engines != (EMBEDDED,):
        about = "What computes; vllm starts real servers." if len(engines) > 1 else "What computes."
        options.insert(0, parameter("engine", type=engines, default=engines[0], help=about))
    command.__signature__ = Signature([*options, _JSON, _FORMAT])  # type: ignore[attr-defined]  # as functions may
    return command


def _run(benchmark: Benchmark, module: ModuleType, given: dict[str, Any]) -> dict[str, Any]:
    """In this process. Name and options come before what was measured."""
    measured = module.run(**given)
    if iscoroutine(measured):
        import asyncio

        measured = asyncio.run(measured)
    defaults = {name: option.default for name, option in signature(module.run).parameters.items()}
    # Results are published: of a file or folder they have the name, not where it lies.
    names = {name: value.absolute().name for name, value in given.items() if isinstance(value, Path)}
    return {"benchmark": benchmark.name, **defaults, **given, **names, **measured}


def module_of(benchmark: Benchmark, engine: str, given: dict[str, Any]) -> str:
    """The name of the module that runs. Raises typer.BadParameter for an option that it does not have."""
    for name in given if len(benchmark.engines) > 1 else ():
        owner = benchmark.owners.get(name, engine)
        if engine != owner:
            raise typer.BadParameter(f"only with --engine {owner}", param_hint=f"--{name}")
    if benchmark.name == "load" and "workload" in given and given.keys() & {"changed", "edits"}:
        raise typer.BadParameter("not together with --changed or --edits", param_hint="--workload")
    return f"kvshare_lab.vllm.{benchmark.name}" if engine == VLLM else benchmark.module


for _benchmark in BENCHMARKS:
    app.command(_benchmark.name, help=_benchmark.help)(_command(_benchmark))
