"""
`kvshare replay`: what sharing would save on a log, next to other policies; and `kvshare replay diff`. And
`kvshare workload`: streams in which sharing pays, as JSON lines for replay, bench and load tools.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvshare.cli import traffic_options as options
from kvshare.cli.options import Config, OutputFormat, checked_url
from kvshare.cli.output import ExitCode, is_quiet, note, show
from kvshare.cli.replay_sizes import check_evictions, parse_capacities, parse_tiers
from kvshare.extras import require

if TYPE_CHECKING:
    from kvshare.replay.live import LiveOptions
    from kvshare.replay.options import ReplayOptions, Report

_RUN = "run"
_DEFAULT_CAPACITY = "16GiB"  # what a GPU may have left: 131,072 tokens of a Llama-3-8B


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
    files: options.LogFiles,
    format_name: options.LogFormat = None,
    tokenizer: options.Tokenizer = None,
    arms: options.Arms = None,
    capacity: options.Capacities = None,
    tier: options.Tiers = None,
    eviction: options.Eviction = None,
    bytes_per_token: options.BytesPerToken = None,
    prefill_tokens_per_s: options.PrefillSpeed = 5000.0,
    out: options.ReplayFolder = Path("replay"),
    limit: options.Limit = None,
    interleave: options.Interleave = 1,
    seed: options.ReplaySeed = 0,
    resume: options.Resume = False,
    paper: options.Paper = False,
    url: options.LiveUrl = None,
    key: options.LiveKey = None,
    concurrency: options.InFlight = 4,
    speedup: options.Speedup = None,
    max_tokens: options.MaxTokens = 8,
    config: Config = None,
    as_json: options.ReplayJson = False,
) -> None:
    """
    Show what sharing would save on your traffic, from a log file: no GPU, no model, no server.

    Shows every request of the log to several cache policies and counts the tokens that each need not
    compute. The report is OUT/report.html. `kvshare replay diff A B` compares two runs.
    """
    _check_options(paper=paper, url=url, tier=tier, capacity=capacity, resume=resume, eviction=eviction)
    kind = "paper" if paper else "live" if url else "tiers" if tier else ""
    require("replay", what="`kvshare replay`", embeds=False)
    from kvshare.replay.options import LLAMA3_8B_BYTES_PER_TOKEN, ReplayOptions
    from kvshare.replay.policies import parse_policies
    from kvshare.settings import load_settings

    token_bytes = bytes_per_token or LLAMA3_8B_BYTES_PER_TOKEN
    replayed = ReplayOptions(
        paths=files,
        out=out,
        policies=parse_policies(arms or _default_policies(kind)),
        settings=load_settings(config),
        format_name=format_name,
        tokenizer=tokenizer,
        capacities_tokens=parse_capacities(capacity or ([] if kind else [_DEFAULT_CAPACITY]), token_bytes),
        bytes_per_token=token_bytes,
        prefill_tokens_per_s=prefill_tokens_per_s,
        limit=limit,
        seed=seed,
        interleave=interleave,
    )
    if replayed.embeds:
        require("replay", what="a replay that embeds prompts (--arms fast does not)")
    live = None
    if url:
        from kvshare.replay.live import LiveOptions

        live = LiveOptions(url, key, concurrency, speedup, max_tokens)
    chosen = _chosen(replayed, live, tier, eviction, paper=paper, resume=resume)
    _run(chosen, out, is_drawn=not kind, as_json=as_json)


def _run(replay: Callable[..., Mapping[str, Any]], out: Path, *, is_drawn: bool, as_json: bool) -> None:
    """Replay into a folder, and show the results. `is_drawn`: as a report, too."""
    _make_folder(out)
    try:
        with progress_bar(hidden=as_json) as report:
            document = replay(report=report)
            written = _drawn(out) if is_drawn else out
    except KeyboardInterrupt:
        can_resume = is_drawn and _has_progress(out)
        note("interrupted; continue with --resume" if can_resume else "interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    show(document["kind"], document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)
    if not document.get("complete", True):
        note(f"interrupted; the answers until then are in {out}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    note(f"{'report' if written != out else 'results'}: {written}")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = "is not a folder" if isinstance(exc, FileExistsError) else exc.strerror
        raise typer.BadParameter(f"{out}: {problem}", param_hint="--out") from None


def _chosen(
    replayed: ReplayOptions,
    live: LiveOptions | None,
    tier: list[str] | None,
    eviction: str | None,
    *,
    paper: bool,
    resume: bool,
) -> Callable[..., Mapping[str, Any]]:
    """The replay that the options choose; each imports what it alone needs. Raises usage errors of --tier."""
    if tier:
        from kvshare.replay.tiers import check_tier_arms, replay_tiers

        check_tier_arms(replayed.policies)
        sizes, default = parse_tiers(tier), replayed.settings.store.eviction
        return partial(replay_tiers, replayed, [sizes], check_evictions(eviction, default))
    if paper:
        from kvshare.replay.paper import replay_paper

        return partial(replay_paper, replayed)
    if live is not None:
        from kvshare.replay.live import replay_live

        return partial(replay_live, replayed, live)
    from kvshare.replay.run import replay

    return partial(replay, replayed, resume=resume)


def _drawn(out: Path) -> Path:
    from kvshare.replay.report import write_report

    return write_report(out)


def _has_progress(out: Path) -> bool:
    from kvshare.replay.rows import Checkpoint

    return Checkpoint(out).has_progress


@app.command()
def diff(
    a: options.Results,
    b: options.OtherResults,
    resamples: options.Resamples = 2000,
    seed: options.BootstrapSeed = 0,
    as_json: options.ReplayJson = False,
) -> None:
    """Compare two runs request by request, with 95 % bootstrap intervals over conversations."""
    require("replay", what="`kvshare replay diff`", embeds=False)
    from kvshare.replay.diff import diff as compare

    document = compare(a, b, resamples=resamples, seed=seed)
    show("replay-diff", document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)


def workload(
    name: options.Workload,
    out: options.WorkloadFile,
    source: options.TextSources = None,
    requests: options.MostRequests = 1000,
    seed: options.WorkloadSeed = 0,
) -> None:
    """
    Write a stream of requests in which sharing pays.

    template: forms with other values in their slots. header: date, user and tools on top of a long system
    prompt. window: chats whose oldest turns are dropped. resubmit: earlier turns edited. rag: documents in
    another order, among others. agent: tool transcripts with changed results. revise: a text changed in one
    place and asked about again, forty times.
    """
    from kvshare.replay.workloads import generate, write_rows

    rows = generate(name, source or (), num_requests=requests, seed=seed)
    try:
        number = write_rows(rows, out)
    except OSError as exc:
        raise typer.BadParameter(f"cannot be written: {exc.strerror}", param_hint="--out") from exc
    note(f"{number} requests -> {out}")


def _default_policies(kind: str) -> str:
    if kind == "paper":
        from kvshare.replay.paper import PAPER_POLICIES

        return PAPER_POLICIES
    if kind == "live":
        from kvshare.replay.live import LIVE_POLICIES

        return LIVE_POLICIES
    if kind == "tiers":
        from kvshare.replay.tiers import TIER_POLICIES

        return TIER_POLICIES
    return "all"


def _check_options(
    *,
    paper: bool,
    url: str | None,
    tier: list[str] | None,
    capacity: list[str] | None,
    resume: bool,
    eviction: str | None,
) -> None:
    """Refuse options that would be ignored, and a URL that is not one."""
    without = "cannot be used with --paper or --engine"
    wrong = (
        ("--paper", paper and url, "cannot be used together with --engine"),
        ("--tier", tier and (paper or url), without),
        (
            "--capacity",
            capacity and paper,
            "cannot be used with --paper, whose stores are infinite",
        ),
        ("--capacity", capacity and tier, "cannot be used with --tier, which has its own sizes"),
        ("--resume", resume and (paper or url), without),
        ("--resume", resume and tier, "cannot be used with --tier"),
        ("--eviction", eviction and not tier, "is an option of --tier"),
    )
    for flag, is_wrong, problem in wrong:
        if is_wrong:
            raise typer.BadParameter(problem, param_hint=flag)
    if url:
        checked_url(url, "--engine")


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
