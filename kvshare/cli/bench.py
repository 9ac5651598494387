"""
`kvshare bench ...`: the commands behind the project's published figures.

Each imports `kvshare.bench.<name>` and calls its `run(**options) -> dict`; an option that is not given is not
passed, so that defaults live in one place. A result with `"passed": false` ends with exit code 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvshare.cli.exits import ExitCode
from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import show

app = typer.Typer(no_args_is_help=True, help="Measure: every published figure comes from one of these.")

Seed = Annotated[int | None, typer.Option("--seed", help="Of the prompts and of all else that is drawn.")]
Repeats = Annotated[int | None, typer.Option("--repeats", min=1, help="Measurements per figure.")]
PromptTokens = Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="Length of the prompts.")]
Changed = Annotated[
    float | None, typer.Option("--changed", min=0, max=1, help="Share of tokens that differ.")
]
Edits = Annotated[int | None, typer.Option("--edits", min=0, help="Places where they differ.")]
Json = Annotated[bool, typer.Option("--json", help="The same as --format json.")]


@app.command()
def parity(
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Length of the prompts.")] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Errors of partial attention and KV moves against plain prefill."""
    _run("parity", {"tokens": tokens, "seed": seed}, as_json, output_format)


@app.command()
def ttft(
    engine: Annotated[str | None, typer.Option("--engine", help="What computes: embedded.")] = None,
    prompt_tokens: PromptTokens = None,
    changed: Changed = None,
    edits: Edits = None,
    repeats: Repeats = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Time to the first token of edited prompts, shared and in full."""
    options = {
        "engine": engine,
        "prompt_tokens": prompt_tokens,
        "changed": changed,
        "edits": edits,
        "repeats": repeats,
        "seed": seed,
    }
    _run("ttft", options, as_json, output_format)


@app.command()
def plan(
    stored: Annotated[int | None, typer.Option("--stored", min=1, help="Prompts in the store.")] = None,
    prompt_tokens: PromptTokens = None,
    queries: Annotated[int | None, typer.Option("--queries", min=1, help="Prompts planned.")] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """What looking up and planning cost before anything is computed."""
    options = {"stored": stored, "prompt_tokens": prompt_tokens, "queries": queries, "seed": seed}
    _run("plan", options, as_json, output_format)


@app.command()
def storage(
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="Variants stored.")] = None,
    prompt_tokens: PromptTokens = None,
    changed: Changed = None,
    edits: Edits = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Bytes stored for similar prompts, against what they take apart."""
    options = {
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "changed": changed,
        "edits": edits,
        "seed": seed,
    }
    _run("storage", options, as_json, output_format)


@app.command()
def demo(
    pairs: Annotated[
        int | None, typer.Option("--pairs", min=1, help="Stored prompts, each with an edit.")
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Whether the bundled model answers the edited prompt, not the stored one."""
    _run("demo", {"pairs": pairs, "seed": seed}, as_json, output_format)


@app.command()
def proxy(
    repeats: Repeats = None,
    words: Annotated[int | None, typer.Option("--words", min=1, help="Length of the prompts.")] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Latency that the HTTP front adds to a request."""
    _run("proxy", {"repeats": repeats, "words": words, "seed": seed}, as_json, output_format)


def _run(name: str, options: Mapping[str, Any], as_json: bool, output_format: OutputFormat) -> None:
    given = {option: value for option, value in options.items() if value is not None}
    document = importlib.import_module(f"kvshare.bench.{name}").run(**given)
    show("bench", document, OutputFormat.JSON if as_json else output_format)
    if document.get("passed") is False:
        raise typer.Exit(ExitCode.FAILED)
