"""`kvshare replay`: what sharing would save on a log, beside other policies; and `kvshare replay diff`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvshare.cli.options import Config, OutputFormat
from kvshare.cli.output import is_quiet, note, show
from kvshare.cli.vllm_command import parse_bytes

if TYPE_CHECKING:
    from kvshare.replay.options import Report

Json = Annotated[bool, typer.Option("--json", help="Write the results to stdout as JSON.")]

_RUN = "run"
_DEFAULT_CAPACITY = "16GiB"  # what a GPU may have left: 131,072 tokens of a Llama-3-8B
_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


class _RunByDefault(TyperGroup):
    """`kvshare replay ...` means `kvshare replay run ...`, --help included; a log called "diff" is ./diff."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and args[0] in self.commands
        return super().parse_args(ctx, args if named else [_RUN, *(args or ["--help"])])


class _Run(TyperCommand):
    """Shows its usage without its name, which need not be typed."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.parent.command_path, " ".join(self.collect_usage_pieces(ctx)))


app = typer.Typer(cls=_RunByDefault, help="What sharing would save on your traffic, from a log file.")


@app.command(_RUN, cls=_Run)
def run(
    files: Annotated[list[Path], typer.Argument(help="Logs: plain, gzip or zstd.", metavar="FILE...")],
    log_format: Annotated[
        str | None,
        typer.Option("--format", help="Format of the logs, or plain:FIELD. [default: auto-detected]"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Hugging Face name, folder or tokenizer.json. [default: SmolLM2's]"),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option("--arms", help="Policies, with commas; `fast`: all that embed nothing. [default: all]"),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            "--capacity",
            help="Finite stores beside the infinite one, with commas: tokens (500k), bytes (4GiB), or none. "
            "[default: 16GiB; none with --paper or --engine]",
        ),
    ] = None,
    bytes_per_token: Annotated[
        int | None,
        typer.Option("--bytes-per-token", min=1, help="KV bytes of a token. [default: Llama-3-8B's]"),
    ] = None,
    prefill: Annotated[
        float,
        typer.Option("--prefill-tokens-per-s", min=1e-9, help="Your engine's speed, for the time saved."),
    ] = 5000.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for report and results.")] = Path("replay"),
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N requests.")] = None,
    interleave: Annotated[
        int, typer.Option("--interleave", min=1, help="Conversations that take turns, in logs without times.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all random choices.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Build the source paper's figures 2 and 4 from the log instead.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="URL", help="Send the log to this server instead.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", envvar="KVSHARE_API_KEY", help="With --engine: an API key.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="With --engine: requests in flight.")
    ] = 4,
    speedup: Annotated[
        float | None,
        typer.Option("--speedup", min=1e-9, help="With --engine: times the log's pace. [default: no pauses]"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="With --engine: tokens of an answer.")
    ] = 8,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """
    What sharing would save on your traffic, from a log file: no GPU, no model, no server.

    Shows every request of the log to several cache policies and counts the tokens that each need not
    compute. The report is OUT/report.html. `kvshare replay diff A B` compares two runs.
    """
    _check_options(paper=paper, engine=engine, resume=resume, capacity=capacity)
    from kvshare.replay.live import LIVE_POLICIES, LiveOptions, replay_live
    from kvshare.replay.options import LLAMA3_8B_BYTES_PER_TOKEN, ReplayOptions
    from kvshare.replay.paper import PAPER_POLICIES, replay_paper
    from kvshare.replay.policies import parse_policies
    from kvshare.replay.report import write_report
    from kvshare.replay.rows import Checkpoint
    from kvshare.replay.run import replay
    from kvshare.settings import load_settings

    bytes_per_token = bytes_per_token or LLAMA3_8B_BYTES_PER_TOKEN
    default_capacity = [] if paper or engine else [_DEFAULT_CAPACITY]
    options = ReplayOptions(
        paths=files,
        out=out,
        policies=parse_policies(arms or (PAPER_POLICIES if paper else LIVE_POLICIES if engine else "all")),
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
    written = out
    try:
        with progress_bar(hidden=as_json) as report:
            if paper:
                document = replay_paper(options, report=report)
            elif engine:
                live = LiveOptions(engine, key, concurrency, speedup, max_tokens)
                document = replay_live(options, live, report=report)
            else:
                document = replay(options, resume=resume, report=report)
                written = write_report(out)
    except KeyboardInterrupt:
        can_resume = not (paper or engine) and Checkpoint(out).has_progress
        note("interrupted; continue with --resume" if can_resume else "interrupted")
        raise typer.Exit(_INTERRUPTED) from None
    show(document["kind"], document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)
    if not document.get("complete", True):
        note(f"interrupted; the answers until then are in {out}")
        raise typer.Exit(_INTERRUPTED)
    note(f"{'report' if written != out else 'results'}: {written}")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A folder of results.")],
    b: Annotated[Path, typer.Argument(help="Another, of the same log.")],
    resamples: Annotated[int, typer.Option("--resamples", min=1, help="Samples of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the bootstrap.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare two runs request by request, with 95 % bootstrap intervals over conversations."""
    require("replay", what="`kvshare replay diff`")
    from kvshare.replay.diff import diff as compare

    document = compare(a, b, resamples=resamples, seed=seed)
    show("replay-diff", document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)


def _check_options(*, paper: bool, engine: str | None, resume: bool, capacity: list[str] | None) -> None:
    """Refuses options that would be ignored, and a URL that is none."""
    wrong = {
        "--paper": (paper and engine, "cannot be used together with --engine"),
        "--capacity": (paper and capacity, "cannot be used with --paper, whose stores are infinite"),
        "--resume": (
            resume and (paper or engine),
            "cannot be used with --paper or --engine",
        ),
        "--engine": (
            engine and not engine.startswith(("http://", "https://")),
            f"expected http://host:port, got {engine!r}",
        ),
    }
    for option, (is_wrong, problem) in wrong.items():
        if is_wrong:
            raise typer.BadParameter(problem, param_hint=option)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = "is not a folder" if isinstance(exc, FileExistsError) else exc.strerror
        raise typer.BadParameter(f"{out}: {problem}", param_hint="--out") from None


def _capacities(texts: list[str], bytes_per_token: int) -> tuple[int, ...]:
    """Tokens, ascending, each once; "none" alone is none."""
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    return () if words == ["none"] else tuple(sorted({_tokens(word, bytes_per_token) for word in words}))


def _tokens(word: str, bytes_per_token: int) -> int:
    """Of "500k" tokens, or "4GB" or "4GiB" bytes."""
    is_bytes = word.lower().endswith("b")
    try:
        amount = parse_bytes(word if is_bytes else f"{word}b")
    except typer.BadParameter as exc:
        message = f"expected tokens like 500k, bytes like 4GiB or none, got {word!r}"
        raise typer.BadParameter(message, param_hint="--capacity") from exc
    tokens = amount // bytes_per_token if is_bytes else amount
    if tokens < 1:
        raise typer.BadParameter(f"{word} has no room for a token", param_hint="--capacity")
    return tokens


@contextmanager
def progress_bar(*, hidden: bool) -> Iterator[Report]:
    """A bar on stderr, with the rate and the remaining time; none where stderr is not a terminal."""
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
