"""
`kvshare bench ...`: the commands behind the project's published figures.

benchmarks.py and served_benchmarks.py declare them. Only options that were given are passed on: what measures
has the defaults. A result with `"passed": false` ends with exit code 1. In a git checkout a result carries
its `commit`.
"""

from collections.abc import Mapping
from functools import partial
from inspect import iscoroutine, signature
from pathlib import Path
from typing import Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from kvshare.cli.options import OutputFormat
from kvshare.cli.output import ExitCode, show
from kvshare.cli.plugins import LAB
from kvshare_lab.checkout import checkout_commit
from kvshare_lab.cli import benchmarks as own
from kvshare_lab.cli import served_benchmarks as served
from kvshare_lab.cli import view
from kvshare_lab.cli.benchmark import EMBEDDED, Benchmark, Option
from kvshare_lab.vllm.termination import ending_on_sigterm

BENCHMARKS = (
    *(served.parity, served.ttft, served.restart, served.load, served.acceptance, served.way, served.steady),
    *(served.interference, served.soak, served.gpu, own.device, served.inway, own.plan, own.index),
    *(own.replay, own.fidelity, served.burst, own.papers, own.pairs, own.agents, own.grammar),
    *(own.connections, own.flood, own.proxy),
)
_JSON = Option("as_json", bool, "The same as --format json.", flag="--json", default=False)
_FORMAT = Option(
    "output_format",
    OutputFormat,
    "terminal for people, json for programs.",
    flag="--format",
    default=OutputFormat.TERMINAL,
)


class _Benchmarks(TyperGroup):
    """A command for each benchmark."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for benchmark in BENCHMARKS:
            self.add_command(_command(benchmark))


app = typer.Typer(cls=_Benchmarks, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback(help=LAB["bench"])  # as the product lists it
def bench() -> None:
    pass


def _command(benchmark: Benchmark) -> TyperCommand:
    engines = benchmark.engines
    about = "What computes; vllm starts real servers." if len(engines) > 1 else "What computes."
    engine = Option("engine", Literal.__getitem__(engines), about, default=engines[0])
    return TyperCommand(
        benchmark.name,
        params=[*([] if engines == (EMBEDDED,) else [engine]), *benchmark.options, _JSON, _FORMAT],
        callback=partial(_measure, benchmark),
        help=benchmark.help,
        rich_markup_mode=None,
    )


def _measure(
    benchmark: Benchmark,
    *,
    as_json: bool,
    output_format: OutputFormat,
    engine: str = EMBEDDED,
    **options: Any,
) -> None:
    """Run a benchmark with the options that were given, and show its result."""
    given = {name: value for name, value in options.items() if value is not None}
    _check(benchmark, engine, given)
    runner = benchmark.load(engine)
    commit = checkout_commit()
    with ending_on_sigterm():  # the servers that it has started end, too
        if runner.config is not None:
            document = runner.run(runner.config(**given))
        else:
            document = _in_this_process(benchmark, runner.run, given)
    if commit is not None:
        document["commit"] = commit
    show(view.bench, document, OutputFormat.JSON if as_json else output_format)
    if document.get("passed") is False:
        raise typer.Exit(ExitCode.FAILED)


def _in_this_process(benchmark: Benchmark, run: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Name and options come before what was measured."""
    measured = run(**given)
    if iscoroutine(measured):
        import asyncio

        measured = asyncio.run(measured)
    defaults = {name: option.default for name, option in signature(run).parameters.items()}
    # Results are published: of a file or folder they have the name, not where it lies.
    names = {name: value.absolute().name for name, value in given.items() if isinstance(value, Path)}
    return {"benchmark": benchmark.name, **defaults, **given, **names, **measured}


def _check(benchmark: Benchmark, engine: str, given: Mapping[str, Any]) -> None:
    """Raises typer.BadParameter for options that the engine does not have, or that exclude each other."""
    for option in benchmark.options if len(benchmark.engines) > 1 else ():
        if option.name in given and option.engine not in (None, engine):
            raise typer.BadParameter(f"only with --engine {option.engine}", param_hint=f"--{option.name}")
    if benchmark.name == "load" and "workload" in given and given.keys() & {"changed", "edits"}:
        raise typer.BadParameter("not together with --changed or --edits", param_hint="--workload")
