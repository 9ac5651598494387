"""
`kvshare bench ...`: the commands behind the project's published figures. bench.toml has their options.

A command calls `run(**options)` of `kvshare.bench.<name>`, or with vLLM `run(Config(**options))` of
`kvshare.bench.vllm.<name>`. It passes only options that were given: those functions have the defaults. A
result with `"passed": false` ends with exit code 1. In a git checkout a result carries its `commit`.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature, iscoroutine, signature
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import typer

from kvshare.cli.checkout import checkout_commit
from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import ExitCode, show
from kvshare.extras import require

app = typer.Typer(no_args_is_help=True, help="Measure: every published figure comes from one of these.")

EMBEDDED, VLLM = "embedded", "vllm"
_BOTH = (EMBEDDED, VLLM)
# Options of one engine only, in commands that have both.
_OWNERS = {**dict.fromkeys(("threads", "dtype", "eager"), VLLM), "model": EMBEDDED, "family": EMBEDDED}
_TYPES = {"int": int, "float": float, "text": str, "flag": bool, "path": Path, "agent": Literal["agent"]}
_ENGINES = {EMBEDDED: Literal["embedded", "vllm"], VLLM: Literal["vllm"]}  # by the default


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command. `options`: without those that all commands have. `engines`: the default one first."""

    name: str
    help: str
    options: tuple[Parameter, ...]
    engines: tuple[str, ...]

    @property
    def signature(self) -> Signature:
        """All options, as Typer reads them from a function."""
        default, engine = self.engines[0], []
        if self.engines != (EMBEDDED,):
            about = "What computes; vllm starts real servers." if self.engines == _BOTH else "What computes."
            engine = [_option("engine", default, about, default=default)]
        return Signature([*engine, *self.options, _JSON, _FORMAT])


def _option(
    name: str, type: str = "int", help: str = "", *, flags: str = "", default: object = None, **limits: float
) -> Parameter:
    """An option of this type; None where it is not given, unless it has a default."""
    info = typer.Option(default, *filter(None, [flags]), help=help, **limits)  # type: ignore[arg-type]  # limits
    kind: Any = {**_TYPES, **_ENGINES}[type]
    annotation = kind | None if default is None else kind
    return Parameter(name, Parameter.KEYWORD_ONLY, default=info, annotation=annotation)


_JSON = _option("as_json", "flag", "The same as --format json.", flags="--json", default=False)
_FORMAT = Parameter("output_format", Parameter.KEYWORD_ONLY, default=OutputFormat.TERMINAL, annotation=Format)


def _benchmarks() -> Iterator[Benchmark]:
    """As bench.toml has them."""
    document = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    shared = document["options"]
    for name, command in document["commands"].items():
        given = (
            dict(shared[each], name=each) if isinstance(each, str) else each for each in command["options"]
        )
        options = tuple(_option(**each) for each in given)
        yield Benchmark(name, command["help"], options, tuple(command.get("engines", [EMBEDDED])))


BENCHMARKS = tuple(_benchmarks())


def _command(benchmark: Benchmark) -> Callable[..., None]:
    """A function with the benchmark's options as its parameters, from which Typer makes a command."""

    def command(**options: Any) -> None:
        as_json, output_format = options.pop("as_json"), options.pop("output_format")
        engine = options.pop("engine", EMBEDDED)
        given = {name: value for name, value in options.items() if value is not None}
        chosen = _chosen(benchmark, engine, given)
        require("bench", what="`kvshare bench`")
        module = importlib.import_module(chosen)
        commit = checkout_commit()
        document = module.run(module.Config(**given)) if engine == VLLM else _run(benchmark, module, given)
        if commit is not None:
            document["commit"] = commit
        show("bench", document, OutputFormat.JSON if as_json else output_format)
        if document.get("passed") is False:
            raise typer.Exit(ExitCode.FAILED)

    command.__signature__ = benchmark.signature  # type: ignore[attr-defined]  # functions may have one
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


def _chosen(benchmark: Benchmark, engine: str, given: dict[str, Any]) -> str:
    """The name of the module that runs. Raises typer.BadParameter for an option that it does not have."""
    for name in given if benchmark.engines == _BOTH else ():
        owner = _OWNERS.get(name, engine)
        if engine != owner:
            raise typer.BadParameter(f"only with --engine {owner}", param_hint=f"--{name}")
    if benchmark.name == "load" and "workload" in given and given.keys() & {"changed", "edits"}:
        raise typer.BadParameter("not together with --changed or --edits", param_hint="--workload")
    package = "kvshare.bench.vllm" if engine == VLLM else "kvshare.bench"
    return f"{package}.{benchmark.name}"


for _benchmark in BENCHMARKS:
    app.command(_benchmark.name, help=_benchmark.help)(_command(_benchmark))
