"""How a replay's results look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

Document = Mapping[str, Any]

_NUM_LINES = 5  # of those that could not be read


def replay(document: Document) -> list[RenderableType]:
    data, times = document["data"], document["times"]
    head = (
        f"{data['num_requests']:,} requests of {data['num_conversations']:,} conversations, "
        f"{data['num_tokens']:,} prompt tokens; {times['requests_per_s']:,.0f} requests/s"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in (
        "arm",
        "tokens not computed",
        "requests >= 50 %",
        ">= 70 %",
        ">= 90 %",
        "TTFT saved",
        "store",
    ):
        table.add_column(name, justify="left" if name == "arm" else "right")
    table.add_column("false hits", justify="right")
    for name in ("look up, p99", "plan, p99"):
        table.add_column(name, justify="right")
    for arm in document["arms"]:
        clock = times["arms"][arm["label"]]
        false_hits = f"{arm['num_false_hits']:,} of {arm['num_answered']:,}" if arm["num_answered"] else ""
        table.add_row(
            arm["label"],
            _percent(arm["token_hit_rate"]),
            *(_percent(arm[f"request_hit_rate_{share}"]) for share in (50, 70, 90)),
            f"{arm['ttft_saved_s']['mean'] * 1000:,.0f} ms",
            f"{arm['storage']['final_bytes'] / 1e9:,.2f} GB",
            false_hits,
            *(f"{clock[name]['p99']:,.1f} ms" for name in ("lookup_ms", "plan_ms")),
        )
    return [head, *_unreadable(document), table]


def diff(document: Document) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for arm in document["arms"]:
        table = Table(title=arm["label"], title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("figure", "a", "b", "b - a", "95 % interval", ""):
            table.add_column(name, justify="left" if name == "figure" else "right")
        for figure in arm["figures"]:
            table.add_row(
                figure["name"].replace("_", " "),
                _percent(figure["a"]),
                _percent(figure["b"]),
                f"{100 * figure['difference']:+.2f}",
                f"{100 * figure['low']:+.2f} to {100 * figure['high']:+.2f}",
                "differs" if figure["differs"] else "",
            )
        parts.append(table)
    for side in ("a", "b"):
        if missing := document[f"only_in_{side}"]:
            parts.append(f"only in {side}: {', '.join(missing)}")
    return parts or ["no arm is in both runs"]


def live(document: Document) -> list[RenderableType]:
    ttft, reported = document["ttft_ms"], document["reported"]
    head = "" if document["complete"] else "interrupted: "
    head += (
        f"{document['num_requests']:,} requests, {document['num_failed']:,} failed; "
        f"{document['requests_per_s']:,.1f} requests/s; time to first token {ttft['p50']:,.0f} ms median, "
        f"{ttft['p99']:,.0f} ms p99; the engine says {_percent(reported['token_hit_rate'])} of the tokens "
        "were not computed"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("prediction", "tokens not computed", "off by, mean", "within 5 %"):
        table.add_column(name, justify="left" if name == "prediction" else "right")
    for arm in document["predicted"]:
        shares = (arm[name] for name in ("token_hit_rate", "mean_difference", "within_5_percent"))
        table.add_row(arm["arm"], *(_percent(share) for share in shares))
    times = Table(box=box.SIMPLE_HEAD)
    for name in ("share not computed", "requests", "median TTFT", "p99"):
        times.add_column(name, justify="right")
    for row in document["ttft_ms_by_cached_share"]:
        share = f"from {100 * row['from']:.0f} %"
        times.add_row(share, f"{row['num_requests']:,}", f"{row['p50']:,.0f} ms", f"{row['p99']:,.0f} ms")
    return [head, *_unreadable(document), *_unlike(document["token_counts"]), table, times]


def paper(document: Document) -> list[RenderableType]:
    figure_2, figure_4 = document["figure_2"], document["figure_4"]
    shares = figure_2["shares"]
    head = (
        f"{figure_2['num_prompts']:,} first prompts: {_percent(shares['identical'])} have an identical "
        f"earlier one, {_percent(shares['similar'])} a similar one; the Similar subset has "
        f"{figure_4['num_prompts']:,} prompts of {figure_4['num_tokens']:,} tokens"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("arm", "tokens not computed", "requests >= 50 %", ">= 70 %", ">= 90 %"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm in figure_4["arms"]:
        at_least = (_percent(arm["at_least"][share]) for share in ("50", "70", "90"))
        table.add_row(arm["arm"], _percent(arm["token_hit_rate"]), *at_least)
    return [head, *_unreadable(document), table]


def _unreadable(document: Document) -> list[RenderableType]:
    """Where the first rows stand that could not be read, and why."""
    unreadable = document["data"]["unreadable"]
    lines = unreadable["lines"][:_NUM_LINES]
    if not lines:
        return []
    parts = [f"{unreadable['num_rows']:,} rows could not be read:"]
    parts += [f"  {escape(row['source'])}:{row['line']}  {row['reason']}" for row in lines]
    if more := unreadable["num_rows"] - len(lines):
        parts.append(f"  and {more:,} more")
    return list(parts)


def _unlike(counts: Document) -> list[RenderableType]:
    if not counts["num_unlike"]:
        return []
    return [
        f"warning: of {counts['num_unlike']:,} of {counts['num_requests']:,} requests the server counts "
        f"other tokens than the replay ({counts['server']:,} and {counts['here']:,} in all), and no chat "
        "template explains it: the predictions are another tokenizer's; name the server's with --tokenizer"
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
