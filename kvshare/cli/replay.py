"""
`kvshare replay`: what sharing would save on a log, next to other policies; and `kvshare replay diff`. And
`kvshare workload`: streams in which sharing pays, as JSON lines for replay, bench and load tools.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from kvshare.cli.options import Config, OutputFormat, argument, checked_url, option, with_options
from kvshare.cli.output import ExitCode, is_quiet, note, show
from kvshare.cli.replay_sizes import check_evictions, parse_capacities, parse_tiers
from kvshare.extras import require

if TYPE_CHECKING:
    from kvshare.replay.options import ReplayOptions, Report
    from kvshare.replay.tiers import TierSizes

Files = Annotated[list[Path], typer.Argument(help="Logs: plain, gzip or zstd.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Write the results to stdout as JSON.")]

# As in `kvshare.replay.workloads.WORKLOADS`; named here so that --help need not import it.
WorkloadName = Literal["template", "header", "window", "resubmit", "rag", "agent", "revise"]

_RUN = "run"
_DEFAULT_CAPACITY = "16GiB"  # what a GPU may have left: 131,072 tokens of a Llama-3-8B


class _Tiered(NamedTuple):
    """Memory and disk, and the policies that are compared."""

    sizes: TierSizes
    evictions: tuple[str, ...]


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
@with_options("replay")
def run(files: Files, *, config: Config = None, as_json: Json = False, **options: Any) -> None:
    """
    What sharing would save on your traffic, from a log file: no GPU, no model, no server.

    Shows every request of the log to several cache policies and counts the tokens that each need not
    compute. The report is OUT/report.html. `kvshare replay diff A B` compares two runs.
    """
    _check_options(options)
    paper, resume, out = options.pop("paper"), options.pop("resume"), options["out"]
    capacity, arms = options.pop("capacity"), options.pop("arms")
    tier, eviction = options.pop("tier"), options.pop("eviction")
    sent = {name: options.pop(name) for name in ("url", "key", "concurrency", "speedup", "max_tokens")}
    kind = "paper" if paper else "live" if sent["url"] else "tiers" if tier else ""
    require("replay", what="`kvshare replay`", embeds=False)
    replayed = _replay_options(
        options,
        paths=files,
        policies=arms or _default_policies(kind),
        config=config,
        capacity=capacity or ([] if kind else [_DEFAULT_CAPACITY]),
    )
    tiered = _tiered(tier, eviction, replayed) if tier else None
    _make_folder(out)
    try:
        with progress_bar(hidden=as_json) as report:
            document = _replay(replayed, sent, tiered, paper=paper, resume=resume, report=report)
            written = out if kind else _drawn(out)
    except KeyboardInterrupt:
        can_resume = not kind and _has_progress(out)
        note("interrupted; continue with --resume" if can_resume else "interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    show(document["kind"], document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)
    if not document.get("complete", True):
        note(f"interrupted; the answers until then are in {out}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    note(f"{'report' if written != out else 'results'}: {written}")


def _replay_options(
    options: dict[str, Any], *, paths: list[Path], policies: str, config: Path | None, capacity: list[str]
) -> ReplayOptions:
    """Raises typer.BadParameter for a capacity, and what policies, settings and extras raise."""
    from kvshare.replay.options import LLAMA3_8B_BYTES_PER_TOKEN, ReplayOptions
    from kvshare.replay.policies import parse_policies
    from kvshare.settings import load_settings

    options["bytes_per_token"] = options["bytes_per_token"] or LLAMA3_8B_BYTES_PER_TOKEN
    replayed = ReplayOptions(
        paths=paths,
        policies=parse_policies(policies),
        settings=load_settings(config),
        capacities_tokens=parse_capacities(capacity, options["bytes_per_token"]),
        **options,
    )
    if replayed.embeds:
        require("replay", what="a replay that embeds prompts (--arms fast does not)")
    return replayed


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        problem = "is not a folder" if isinstance(exc, FileExistsError) else exc.strerror
        raise typer.BadParameter(f"{out}: {problem}", param_hint="--out") from None


def _tiered(tier: list[str], eviction: str | None, replayed: ReplayOptions) -> _Tiered:
    """Raises usage errors, also for arms that have no tiers."""
    from kvshare.replay.tiers import check_tier_arms

    check_tier_arms(replayed.policies)
    return _Tiered(parse_tiers(tier), check_evictions(eviction, replayed.settings.store.eviction))


def _replay(
    replayed: ReplayOptions,
    sent: dict[str, Any],
    tiered: _Tiered | None,
    *,
    paper: bool,
    resume: bool,
    report: Report,
) -> Mapping[str, Any]:
    """The results, as a document. Each kind imports what it alone needs, seconds in all."""
    if tiered is not None:
        from kvshare.replay.tiers import replay_tiers

        return replay_tiers(replayed, [tiered.sizes], tiered.evictions, report=report)
    if paper:
        from kvshare.replay.paper import replay_paper

        return replay_paper(replayed, report=report)
    if sent["url"]:
        from kvshare.replay.live import LiveOptions, replay_live

        return replay_live(replayed, LiveOptions(**sent), report=report)
    from kvshare.replay.run import replay

    return replay(replayed, resume=resume, report=report)


def _drawn(out: Path) -> Path:
    """The page that shows the results in a folder, written now."""
    from kvshare.replay.report import write_report

    return write_report(out)


def _has_progress(out: Path) -> bool:
    from kvshare.replay.rows import Checkpoint

    return Checkpoint(out).has_progress


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A folder of results.")],
    b: Annotated[Path, typer.Argument(help="Another, of the same log.")],
    resamples: Annotated[int, typer.Option("--resamples", min=1, help="Samples of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the bootstrap.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare two runs request by request, with 95 % bootstrap intervals over conversations."""
    require("replay", what="`kvshare replay diff`", embeds=False)
    from kvshare.replay.diff import diff as compare

    document = compare(a, b, resamples=resamples, seed=seed)
    show("replay-diff", document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)


def workload(
    name: Annotated[WorkloadName, argument("workload", "name")],
    out: Annotated[Path, option("workload", "--out", "-o")],
    source: Annotated[list[Path] | None, option("workload", "--source")] = None,
    requests: Annotated[int, option("workload", "--requests", "-n", min=1)] = 1000,
    seed: Annotated[int, option("workload", "--seed")] = 0,
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


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that would be ignored, and a URL that is not one."""
    paper, url, tier, capacity = (options[name] for name in ("paper", "url", "tier", "capacity"))
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
        ("--resume", options["resume"] and (paper or url), without),
        ("--resume", options["resume"] and tier, "cannot be used with --tier"),
        ("--eviction", options["eviction"] and not tier, "is an option of --tier"),
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
