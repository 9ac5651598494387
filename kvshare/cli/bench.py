"""
`kvshare bench ...`: the commands behind the project's published figures, as one table.

Each calls `run(**options)` of `kvshare.bench.<name>`, or where the engine is vLLM `run(Config(**options))` of
`kvshare.bench.vllm.<name>`. An option that is not given is not passed: defaults live in one place. A result
with `"passed": false` ends with exit code 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, iscoroutine
from pathlib import Path
from typing import Any, Literal

import typer

from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import ExitCode, show

app = typer.Typer(no_args_is_help=True, help="Measure: every published figure comes from one of these.")

EMBEDDED, VLLM = "embedded", "vllm"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """
    A command: its name, its help, its options beside those that all have.

    `engines`: what it can run on, the default first.
    """

    name: str
    help: str
    options: tuple[Parameter, ...]
    engines: tuple[str, ...] = (EMBEDDED,)

    @property
    def signature(self) -> Signature:
        """All options, as Typer reads them from a function."""
        return Signature([*_ENGINE[self.engines], *self.options, _JSON, _FORMAT])


def _option(
    name: str, kind: Any, help_text: str, *flags: str, default: object = None, **limits: Any
) -> Parameter:
    """An option of this type; None where it is not given, unless it has a default."""
    info = typer.Option(default, *flags, help=help_text, **limits)
    annotation = kind | None if default is None else kind
    return Parameter(name, Parameter.KEYWORD_ONLY, default=info, annotation=annotation)


_Engine = Literal["embedded", "vllm"]
_BOTH, _ONLY_VLLM = (EMBEDDED, VLLM), (VLLM,)
_ENGINE: Mapping[tuple[str, ...], tuple[Parameter, ...]] = {
    (EMBEDDED,): (),
    _BOTH: (_option("engine", _Engine, "What computes; vllm starts real servers.", default=EMBEDDED),),
    _ONLY_VLLM: (_option("engine", Literal["vllm"], "What computes.", default=VLLM),),
}
_OWNERS = {"threads": VLLM, "dtype": VLLM, "eager": VLLM, "model": EMBEDDED}  # where there are both engines
_JSON = _option("as_json", bool, "The same as --format json.", "--json", default=False)
_FORMAT = Parameter("output_format", Parameter.KEYWORD_ONLY, default=OutputFormat.TERMINAL, annotation=Format)

_SEED = _option("seed", int, "Of the prompts and of all else that is drawn.")
_REPEATS = _option("repeats", int, "Measurements per figure.", min=1)
_PROMPT_TOKENS = _option("prompt_tokens", int, "Length of the prompts.", min=1)
_STORED = _option("stored", int, "Prompts in the store.", min=1)
_CONCURRENCY = _option("concurrency", int, "Clients at a time.", min=1)
_EDITED = (
    _PROMPT_TOKENS,
    _option("changed", float, "Share of tokens that differ.", min=0, max=1),
    _option("edits", int, "Places where they differ.", min=0),
)
_THREADS = _option("threads", int, "Of each vLLM. [default: all cores but one]", min=1)
_DTYPE = _option("dtype", str, "Of the vLLM servers. [default: bfloat16]")
_EAGER = _option("eager", bool, "The vLLM servers do not compile the model. [default: they do]", "--eager")
_SERVERS = (_THREADS, _DTYPE, _EAGER)


def _dense(default: str) -> Parameter:
    return _option("dense", bool, f"With meanings. [default: {default}]", "--dense/--no-dense")


BENCHMARKS = (
    Benchmark(
        "parity",
        "Errors of partial attention and KV moves against plain prefill.",
        (_option("tokens", int, "Length of the prompts.", min=1), _SEED, _THREADS),
        engines=_BOTH,
    ),
    Benchmark(
        "ttft",
        "Time to the first token of edited prompts, shared and in full.",
        (
            *(*_EDITED, _REPEATS, _SEED, _THREADS, _DTYPE),
            _option(
                "model",
                str,
                "Embedded: a model on real text, such as default. [default: random weights and tokens]",
            ),
            _EAGER,
        ),
        engines=_BOTH,
    ),
    Benchmark(
        "load",
        "Throughput and latency of concurrent clients, with and without sharing.",
        (
            _CONCURRENCY,
            _option("requests", int, "Per arm and repeat.", min=2),
            _option(
                "workload", Path, "Send this file's first prompts, cut to --prompt-tokens, not made-up ones."
            ),
            *(*_EDITED, _REPEATS, _SEED, *_SERVERS),
        ),
        engines=_ONLY_VLLM,
    ),
    Benchmark(
        "steady",
        "Whether sharing still pays once the store is full.",
        (
            _option("batches", int, "Of new prompts.", min=2),
            *_EDITED,
            _option("kv_bytes", int, "Of the store. [default: too few by design]", min=1),
            *(_SEED, *_SERVERS),
        ),
        engines=_ONLY_VLLM,
    ),
    Benchmark(
        "soak",
        "Mixed traffic with aborts and evictions: every exact answer must be vLLM's own.",
        (_option("minutes", float, "Of traffic.", min=0), _CONCURRENCY, _SEED, _THREADS, _EAGER),
        engines=_ONLY_VLLM,
    ),
    Benchmark(
        "plan",
        "What looking up and planning cost before anything is computed.",
        (
            _option(
                "workload",
                Literal["agent"],
                "agent: long transcripts with edits. [default: forms of one length]",
            ),
            *(_STORED, _PROMPT_TOKENS, _option("queries", int, "Prompts planned.", min=1), _SEED),
        ),
    ),
    Benchmark(
        "commit",
        "What storing a prompt costs where another must be evicted for it.",
        (
            _option("stored", int, "Prompts in the full store.", min=8),
            *(_PROMPT_TOKENS, _option("commits", int, "Into each store.", min=1), _SEED),
        ),
    ),
    Benchmark(
        "index",
        "What nominating costs with very many prompts stored, and what their index takes.",
        (
            _option("stored", int, "Prompts in the index.", min=1),
            *(_PROMPT_TOKENS, _option("queries", int, "Of each kind.", min=1), _dense("dense"), _SEED),
        ),
    ),
    Benchmark(
        "replay",
        "How fast a log is replayed through KVShare, as the store grows.",
        (
            *(_STORED, _PROMPT_TOKENS, _option("requests", int, "Measured at each size.", min=1)),
            _dense("no-dense"),
            _option("threads", int, "Of the embedder. [default: all cores]", min=1),
            _SEED,
        ),
    ),
    Benchmark(
        "storage",
        "Bytes stored for similar prompts, against what they take apart.",
        (_option("prompts", int, "Variants stored.", min=1), *_EDITED, _SEED),
    ),
    Benchmark(
        "demo",
        "Whether the bundled model answers the edited prompt, not the stored one.",
        (_option("pairs", int, "Stored prompts, each with an edit.", min=1), _SEED),
    ),
    Benchmark(
        "proxy",
        "Latency that the HTTP front adds to a request.",
        (_REPEATS, _option("words", int, "Length of the prompts.", min=1), _SEED),
    ),
)


def _command(benchmark: Benchmark) -> Callable[..., None]:
    """A function with the benchmark's options as its parameters: what Typer makes a command of."""

    def command(**options: Any) -> None:
        as_json, output_format = options.pop("as_json"), options.pop("output_format")
        engine = options.pop("engine", EMBEDDED)
        given = {name: value for name, value in options.items() if value is not None}
        module = importlib.import_module(_chosen(benchmark, engine, given))
        document = module.run(module.Config(**given)) if engine == VLLM else module.run(**given)
        if iscoroutine(document):
            import asyncio

            document = asyncio.run(document)
        show("bench", document, OutputFormat.JSON if as_json else output_format)
        if document.get("passed") is False:
            raise typer.Exit(ExitCode.FAILED)

    command.__signature__ = benchmark.signature  # type: ignore[attr-defined]  # functions may have one
    return command


def _chosen(benchmark: Benchmark, engine: str, given: dict[str, Any]) -> str:
    """The module that runs; an option that it does not have is wrong usage."""
    for name in given if benchmark.engines == _BOTH else ():
        owner = _OWNERS.get(name, engine)
        if engine != owner:
            raise typer.BadParameter(f"only with --engine {owner}", param_hint=f"--{name}")
    if benchmark.name == "load" and "workload" in given and given.keys() & {"changed", "edits"}:
        raise typer.BadParameter("not together with --changed or --edits", param_hint="--workload")
    package = "kvshare.bench.vllm" if engine == VLLM else "kvshare.bench"
    name = "plan_agent" if benchmark.name == "plan" and given.pop("workload", None) else benchmark.name
    return f"{package}.{name}"


for _benchmark in BENCHMARKS:
    app.command(_benchmark.name, help=_benchmark.help)(_command(_benchmark))
