"""
`kvshare bench ...`: the commands behind the project's published figures.

Each imports `kvshare.bench.<name>`, or `kvshare.bench.vllm.<name>` where the engine is vLLM, and calls its
`run(**options) -> dict`; an option that is not given is not passed, so that defaults live in one place. A
result with `"passed": false` ends with exit code 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshare.cli.exits import ExitCode
from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import show

app = typer.Typer(no_args_is_help=True, help="Measure: every published figure comes from one of these.")


class BenchEngine(StrEnum):
    """What computes: in this process, or real vLLM servers behind the proxy."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


class PlanWorkload(StrEnum):
    """What prompts `bench plan` stores and plans, if not forms."""

    AGENT = "agent"


class VllmEngine(StrEnum):
    """Of the benchmarks that only make sense over real servers."""

    VLLM = "vllm"


Engine = Annotated[BenchEngine, typer.Option("--engine", help="What computes; vllm starts real servers.")]
OnlyVllm = Annotated[VllmEngine, typer.Option("--engine", help="What computes.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Of each vLLM. [default: all cores but one]")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Of the vLLM servers. [default: bfloat16]")]
Eager = Annotated[
    bool | None,
    typer.Option("--eager", help="The vLLM servers do not compile the model. [default: they do]"),
]
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
    engine: Engine = BenchEngine.EMBEDDED,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Length of the prompts.")] = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Errors of partial attention and KV moves against plain prefill."""
    own = _of_vllm(engine, {"threads": threads})
    _run("parity", {"tokens": tokens, "seed": seed, **own}, as_json, output_format, engine=engine)


@app.command()
def ttft(
    engine: Engine = BenchEngine.EMBEDDED,
    prompt_tokens: PromptTokens = None,
    changed: Changed = None,
    edits: Edits = None,
    repeats: Repeats = None,
    seed: Seed = None,
    threads: Threads = None,
    dtype: Dtype = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Embedded: a model on real text, such as default. [default: random weights and tokens]",
        ),
    ] = None,
    eager: Eager = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Time to the first token of edited prompts, shared and in full."""
    if model is not None and engine is not BenchEngine.EMBEDDED:
        raise typer.BadParameter("only with --engine embedded", param_hint="--model")
    options: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "changed": changed,
        "edits": edits,
        "repeats": repeats,
        "seed": seed,
    }
    own = _of_vllm(engine, {"threads": threads, "dtype": dtype, "eager": eager})
    if engine is BenchEngine.EMBEDDED:
        own = {"model": model}
    _run("ttft", {**options, **own}, as_json, output_format, engine=engine)


@app.command()
def load(
    engine: OnlyVllm = VllmEngine.VLLM,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Clients at a time.")
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", min=2, help="Per arm and repeat.")] = None,
    workload: Annotated[
        Path | None,
        typer.Option(help="Send this file's first prompts, cut to --prompt-tokens, not made-up ones."),
    ] = None,
    prompt_tokens: PromptTokens = None,
    changed: Changed = None,
    edits: Edits = None,
    repeats: Repeats = None,
    seed: Seed = None,
    threads: Threads = None,
    dtype: Dtype = None,
    eager: Eager = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Throughput and latency of concurrent clients, with and without sharing."""
    if workload is not None and (changed is not None or edits is not None):
        raise typer.BadParameter("not together with --changed or --edits", param_hint="--workload")
    options = {
        "concurrency": concurrency,
        "requests": requests,
        "workload": workload,
        "prompt_tokens": prompt_tokens,
        "changed": changed,
        "edits": edits,
        "repeats": repeats,
        "seed": seed,
        "threads": threads,
        "dtype": dtype,
        "eager": eager,
    }
    _run("load", options, as_json, output_format, engine=engine)


@app.command()
def steady(
    engine: OnlyVllm = VllmEngine.VLLM,
    batches: Annotated[int | None, typer.Option("--batches", min=2, help="Of new prompts.")] = None,
    prompt_tokens: PromptTokens = None,
    changed: Changed = None,
    edits: Edits = None,
    kv_bytes: Annotated[
        int | None, typer.Option("--kv-bytes", min=1, help="Of the store. [default: too few by design]")
    ] = None,
    seed: Seed = None,
    threads: Threads = None,
    dtype: Dtype = None,
    eager: Eager = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Whether sharing still pays once the store is full."""
    options = {
        "batches": batches,
        "prompt_tokens": prompt_tokens,
        "changed": changed,
        "edits": edits,
        "kv_bytes": kv_bytes,
        "seed": seed,
        "threads": threads,
        "dtype": dtype,
        "eager": eager,
    }
    _run("steady", options, as_json, output_format, engine=engine)


@app.command()
def soak(
    engine: OnlyVllm = VllmEngine.VLLM,
    minutes: Annotated[float | None, typer.Option("--minutes", min=0, help="Of traffic.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Clients at a time.")
    ] = None,
    seed: Seed = None,
    threads: Threads = None,
    eager: Eager = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Mixed traffic with aborts and evictions: every exact answer must be vLLM's own."""
    options = {
        "minutes": minutes,
        "concurrency": concurrency,
        "seed": seed,
        "threads": threads,
        "eager": eager,
    }
    _run("soak", options, as_json, output_format, engine=engine)


@app.command()
def plan(
    workload: Annotated[
        PlanWorkload | None,
        typer.Option("--workload", help="agent: long transcripts with edits. [default: forms of one length]"),
    ] = None,
    stored: Annotated[int | None, typer.Option("--stored", min=1, help="Prompts in the store.")] = None,
    prompt_tokens: PromptTokens = None,
    queries: Annotated[int | None, typer.Option("--queries", min=1, help="Prompts planned.")] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """What looking up and planning cost before anything is computed."""
    options = {"stored": stored, "prompt_tokens": prompt_tokens, "queries": queries, "seed": seed}
    _run("plan" if workload is None else f"plan_{workload}", options, as_json, output_format)


@app.command()
def commit(
    stored: Annotated[int | None, typer.Option("--stored", min=8, help="Prompts in the full store.")] = None,
    prompt_tokens: PromptTokens = None,
    commits: Annotated[int | None, typer.Option("--commits", min=1, help="Into each store.")] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """What storing a prompt costs where another must be evicted for it."""
    options = {"stored": stored, "prompt_tokens": prompt_tokens, "commits": commits, "seed": seed}
    _run("commit", options, as_json, output_format)


@app.command()
def index(
    stored: Annotated[int | None, typer.Option("--stored", min=1, help="Prompts in the index.")] = None,
    prompt_tokens: PromptTokens = None,
    queries: Annotated[int | None, typer.Option("--queries", min=1, help="Of each kind.")] = None,
    dense: Annotated[
        bool | None, typer.Option("--dense/--no-dense", help="With meanings. [default: dense]")
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """What nominating costs with very many prompts stored, and what their index takes."""
    options = {
        "stored": stored,
        "prompt_tokens": prompt_tokens,
        "queries": queries,
        "dense": dense,
        "seed": seed,
    }
    _run("index", options, as_json, output_format)


@app.command()
def replay(
    stored: Annotated[int | None, typer.Option("--stored", min=1, help="Prompts in the store.")] = None,
    prompt_tokens: PromptTokens = None,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Measured at each size.")] = None,
    dense: Annotated[
        bool | None, typer.Option("--dense/--no-dense", help="With meanings. [default: no-dense]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Of the embedder. [default: all cores]")
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """How fast a log is replayed through KVShare, as the store grows."""
    options = {
        "stored": stored,
        "prompt_tokens": prompt_tokens,
        "requests": requests,
        "dense": dense,
        "threads": threads,
        "seed": seed,
    }
    _run("replay", options, as_json, output_format)


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


def _of_vllm(engine: BenchEngine, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options that only this engine has; given with another one they are wrong usage."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and engine is not BenchEngine.VLLM:
        raise typer.BadParameter("only with --engine vllm", param_hint=f"--{next(iter(given))}")
    return given


def _run(
    name: str,
    options: Mapping[str, Any],
    as_json: bool,
    output_format: OutputFormat,
    *,
    engine: BenchEngine | VllmEngine = BenchEngine.EMBEDDED,
) -> None:
    given = {option: value for option, value in options.items() if value is not None}
    package = "kvshare.bench.vllm" if engine == BenchEngine.VLLM else "kvshare.bench"
    document = importlib.import_module(f"{package}.{name}").run(**given)
    show("bench", document, OutputFormat.JSON if as_json else output_format)
    if document.get("passed") is False:
        raise typer.Exit(ExitCode.FAILED)
