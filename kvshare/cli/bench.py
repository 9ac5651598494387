"""
`kvshare bench ...`: the commands behind the project's published figures.

Each imports `kvshare.bench.<name>` and calls its `run(**options) -> dict`; an option that is not given is not
passed, so that defaults live in one place. A result with `"passed": false` ends with exit code 1.
"""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvshare.cli.exits import ExitCode
from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import show

app = typer.Typer(no_args_is_help=True, help="Measure: every published figure comes from one of these.")

Repeats = Annotated[int | None, typer.Option("--repeats", min=1, help="Measurements per figure.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the prompts and of everything else drawn.")]
Json = Annotated[bool, typer.Option("--json", help="The same as --format json.")]


class BenchEngine(StrEnum):
    """The engine that is measured."""

    EMBEDDED = "embedded"


@app.command()
def parity(
    repeats: Repeats = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """How far sharing moves the model's answers from those of a full prefill."""
    _run("parity", {"repeats": repeats, "seed": seed}, as_json, output_format)


@app.command()
def ttft(
    engine: Annotated[BenchEngine, typer.Option("--engine", help="What computes.")] = BenchEngine.EMBEDDED,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Length of the prompts.")
    ] = 2000,
    changed: Annotated[
        float, typer.Option("--changed", min=0, max=1, help="Share of tokens that differ.")
    ] = 0.1,
    edits: Annotated[int, typer.Option("--edits", min=0, help="Places where they differ.")] = 5,
    repeats: Repeats = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Time to the first token of an edited prompt, shared and in full, side by side."""
    options = {
        "engine": engine.value,
        "prompt_tokens": prompt_tokens,
        "changed": changed,
        "edits": edits,
        "repeats": repeats,
        "seed": seed,
    }
    _run("ttft", options, as_json, output_format)


@app.command()
def plan(
    stored: Annotated[int, typer.Option("--stored", min=1, help="Prompts in the store.")] = 10_000,
    repeats: Repeats = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """What looking up and planning cost before anything is computed."""
    _run("plan", {"stored": stored, "repeats": repeats, "seed": seed}, as_json, output_format)


@app.command()
def storage(
    repeats: Repeats = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Bytes stored for similar prompts, against what they would take apart."""
    _run("storage", {"repeats": repeats, "seed": seed}, as_json, output_format)


@app.command()
def demo(
    repeats: Repeats = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Whether the bundled model still answers the edited prompt, not the stored one."""
    _run("demo", {"repeats": repeats, "seed": seed}, as_json, output_format)


@app.command()
def proxy(
    repeats: Repeats = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Latency that the HTTP front adds to a request."""
    _run("proxy", {"repeats": repeats, "seed": seed}, as_json, output_format)


def _run(name: str, options: dict[str, Any], as_json: bool, output_format: OutputFormat) -> None:
    given = {option: value for option, value in options.items() if value is not None}
    document = importlib.import_module(f"kvshare.bench.{name}").run(**given)
    show("bench", document, OutputFormat.JSON if as_json else output_format)
    if document.get("passed") is False:
        raise typer.Exit(ExitCode.FAILED)
