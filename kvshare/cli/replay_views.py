"""How a replay's results look on a terminal: their columns and lines are in replay_views.yaml."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType

from kvshare.cli.templates import Document, Templates

_NUM_LINES = 5  # of those that could not be read


class _Figures(Templates):
    """Writes percent signs apart from their numbers."""

    def format_field(self, value: Any, format_spec: str) -> str:
        text = super().format_field(value, format_spec)
        return text.replace("%", " %") if format_spec.endswith("%") else text


_TEMPLATES = _Figures(Path(__file__).with_suffix(".yaml"))
_say = _TEMPLATES.say


def replay(document: Document) -> list[RenderableType]:
    """The four main policies and the verdict; the report has all policies."""
    from kvshare.replay.report import parse_report, verdict

    report = parse_report(dict(document))
    policies = [{**one.model_dump(), "saved_ms": 1000 * (one.ttft_saved_s.mean or 0)} for one in report.main]
    others = len(report.arms) - len(policies)
    return [
        _say("replay", document),
        *_unreadable(document),
        *([_table("arms", policies)] if policies else []),
        *([_say("others", {"num": others})] if others else []),
        _say("verdict", {"verdict": verdict(report)}),
    ]


def diff(document: Document) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for policy in document["arms"]:
        figures = (
            {
                **figure,
                **{name: 100 * figure[name] for name in ("difference", "low", "high")},
                "name": figure["name"].replace("_", " "),
                "verdict": "differs" if figure["differs"] else "",
            }
            for figure in policy["figures"]
        )
        parts.append(_table("figures", figures, title=policy["label"]))
    for side in ("a", "b"):
        if missing := document[f"only_in_{side}"]:
            parts.append(_say("only", {"side": side, "arms": ", ".join(missing)}))
    return parts or ["the two runs have no policy in common"]


def live(document: Document) -> list[RenderableType]:
    interrupted, counts = "" if document["complete"] else "interrupted: ", document["token_counts"]
    return [
        _say("live", {**document, "interrupted": interrupted}),
        *_unreadable(document),
        *([_say("unlike", counts)] if counts["num_unlike"] else []),
        _table("predictions", document["predicted"]),
        _table("times", document["ttft_ms_by_cached_share"]),
    ]


def paper(document: Document) -> list[RenderableType]:
    policies = (
        {**policy, **{f"at_least_{share}": of_all for share, of_all in policy["at_least"].items()}}
        for policy in document["figure_4"]["arms"]
    )
    return [_say("paper", document), *_unreadable(document), _table("subset", policies)]


def _table(name: str, rows: Iterable[Document], *, title: str | None = None) -> RenderableType:
    """Names are folded, never cut."""
    table = _TEMPLATES.table(name, rows, title=title, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _unreadable(document: Document) -> list[RenderableType]:
    """Which rows could not be read, and why: the first of them."""
    unreadable = document["data"]["unreadable"]
    lines = unreadable["lines"][:_NUM_LINES]
    num_more = unreadable["num_rows"] - len(lines)
    return [
        *([_say("unreadable", unreadable)] if lines else []),
        *(_say("line", line) for line in lines),
        *([_say("more", {"num_more": num_more})] if lines and num_more else []),
    ]
