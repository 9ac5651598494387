"""`kvshare replay`: what sharing would have saved on a log, beside the alternatives; and `replay diff`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvshare.cli.options import Config, OutputFormat
from kvshare.cli.output import is_quiet, note, show
from kvshare.extras import require

if TYPE_CHECKING:
    from kvshare.replay.options import Report

Json = Annotated[bool, typer.Option("--json", help="The results on stdout as JSON, for programs.")]

_RUN = "run"
_DEFAULT_CAPACITY = "16GiB"  # what a GPU may have left: 131,072 tokens of a Llama-3-8B
_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT
_CAPACITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)(i?[bB])?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}


class _RunByDefault(TyperGroup):
    """`kvshare replay FILE` means `kvshare replay run FILE`; a log called "diff" is ./diff."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="What sharing would save on your own traffic: kvshare replay FILE... [OPTIONS].",
)


@app.command(_RUN)
def run(
    files: Annotated[list[Path], typer.Argument(help="Logs, plain or gzip or zstd.", metavar="FILE...")],
    log_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="Of the files; plain:FIELD takes prompts from a field. [default: found out]"
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", help="A folder, a Hugging Face name, or tokenizer.json. [default: SmolLM2's]"
        ),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option("--arms", help="Comma-separated; `fast` embeds nothing. [default: all]"),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            "--capacity",
            help="Finite stores beside the infinite ones: tokens (500k), bytes (4GiB) or none; repeat or "
            "commas. [default: 16GiB; none with --paper or --engine]",
        ),
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option("--bytes-per-token", min=1, help="Of KV. [default: Llama-3-8B's]")
    ] = None,
    prefill: Annotated[
        float,
        typer.Option("--prefill-tokens-per-s", min=1e-9, help="Of your engine, for the time saved."),
    ] = 5000.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("replay"),
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only so many requests.")] = None,
    interleave: Annotated[
        int, typer.Option("--interleave", min=1, help="Conversations open at once, where a log has no times.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="The source paper's figures 2 and 4 instead; compares all first prompts with each other.",
        ),
    ] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="URL", help="Send it to this running server instead.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", envvar="KVSHARE_API_KEY", help="For --engine: an API key.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="For --engine: requests at a time.")
    ] = 4,
    speedup: Annotated[
        float | None,
        typer.Option("--speedup", min=1e-9, help="For --engine: of the log's pace. [default: no pauses]"),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="For --engine: of an answer.")] = 8,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """What each way of caching would have reused of a log's requests. No GPU, no model."""
    _refuse_together(paper=paper, engine=engine, resume=resume, capacity=capacity)
    require("replay", what="`kvshare replay`")
    from kvshare.replay.arms import parse_arms
    from kvshare.replay.live import LIVE_ARMS, LiveOptions, replay_live
    from kvshare.replay.options import LLAMA3_8B_BYTES_PER_TOKEN, ReplayOptions
    from kvshare.replay.paper import PAPER_ARMS, replay_paper
    from kvshare.replay.report import write_report
    from kvshare.replay.rows import Checkpoint
    from kvshare.replay.run import replay
    from kvshare.settings import load_settings

    bytes_per_token = bytes_per_token or LLAMA3_8B_BYTES_PER_TOKEN
    default_capacity = [] if paper or engine else [_DEFAULT_CAPACITY]
    options = ReplayOptions(
        paths=files,
        out=out,
        arms=parse_arms(arms or (PAPER_ARMS if paper else LIVE_ARMS if engine else "all")),
        settings=load_settings(config),
        format_name=log_format,
        tokenizer=tokenizer,
        capacities_tokens=_capacities(capacity or default_capacity, bytes_per_token),
        bytes_per_token=bytes_per_token,
        prefill_tokens_per_s=prefill,
        limit=limit,
        seed=seed,
        interleave=interleave,
    )
    _make_folder(out)
    try:
        with progress_bar(hidden=as_json) as report:
            if paper:
                document = replay_paper(options, report=report)
            elif engine:
                live = LiveOptions(engine, key, concurrency, speedup, max_tokens)
                document = replay_live(options, live, report=report)
            else:
                document = replay(options, resume=resume, report=report)
                write_report(out)
    except KeyboardInterrupt:
        raise _interrupted(can_resume=not (paper or engine) and Checkpoint(out).has_progress) from None
    _show_results(document, out, as_json=as_json)


def _interrupted(*, can_resume: bool) -> typer.Exit:
    note("interrupted; --resume goes on" if can_resume else "interrupted")
    return typer.Exit(_INTERRUPTED)


def _show_results(document: dict[str, Any], out: Path, *, as_json: bool) -> None:
    complete = document.get("complete", True)
    note(f"written to {out}" if complete else f"interrupted; what was answered until then is in {out}")
    show(document["kind"], document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)
    if not complete:
        raise typer.Exit(_INTERRUPTED)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A folder of results.")],
    b: Annotated[Path, typer.Argument(help="Another, of the same log.")],
    resamples: Annotated[int, typer.Option("--resamples", min=1, help="Of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", help="Of the bootstrap.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare two runs request by request, with 95 % bootstrap intervals over conversations."""
    require("replay", what="`kvshare replay diff`")
    from kvshare.replay.diff import diff as compare

    document = compare(a, b, resamples=resamples, seed=seed)
    show("replay-diff", document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)


def _refuse_together(*, paper: bool, engine: str | None, resume: bool, capacity: list[str] | None) -> None:
    """What would be ignored is wrong usage."""
    if paper and engine:
        raise typer.BadParameter("not together with --engine", param_hint="--paper")
    if paper and capacity:
        raise typer.BadParameter("not together with --paper, which knows no limit", param_hint="--capacity")
    if resume and (paper or engine):
        other = "--paper" if paper else "--engine"
        raise typer.BadParameter(f"not together with {other}, which starts anew", param_hint="--resume")
    if engine and not engine.startswith(("http://", "https://")):
        raise typer.BadParameter(f"expected http://host:port, got {engine!r}", param_hint="--engine")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = "is no folder" if isinstance(exc, FileExistsError) else exc.strerror
        raise typer.BadParameter(f"{out}: {problem}", param_hint="--out") from None


def _capacities(texts: list[str], bytes_per_token: int) -> tuple[int, ...]:
    """Tokens, ascending, each once; "none" alone is none."""
    if texts == ["none"]:
        return ()
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    return tuple(sorted({_capacity_tokens(word, bytes_per_token) for word in words}))


def _capacity_tokens(word: str, bytes_per_token: int) -> int:
    """ "500k" tokens, "4GB" or "4GiB" bytes."""
    match = _CAPACITY.fullmatch(word)
    if match is None:
        raise typer.BadParameter(f"expected tokens like 500k, bytes like 4GiB or none, got {word!r}")
    number, prefix, unit = match.groups()
    base = 1024 if unit and len(unit) == 2 else 1000
    amount = float(number) * base ** _POWERS[prefix.lower()]
    tokens = int(amount / bytes_per_token if unit else amount)
    if tokens < 1:
        raise typer.BadParameter(f"{word} holds not one token")
    return tokens


@contextmanager
def progress_bar(*, hidden: bool) -> Iterator[Report]:
    """
    A bar on stderr with rate and remaining time, while files are read with what was read; nothing where
    stderr is no terminal.
    """
    if hidden or is_quiet() or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("reading", total=None, rate="")

        def report(done: int, total: int | None) -> None:
            if total is not None and bars.tasks[0].total is None:
                bars.reset(task, total=total, description="replaying")
            speed = bars.tasks[0].speed
            rate = f"{speed:,.0f} requests/s" if speed else ""
            bars.update(task, completed=done, total=total, rate=rate)

        yield report
