"""How a replay's results look on a terminal: their columns and lines are in replay_views.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import yaml
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Document = Mapping[str, Any]

_NUM_LINES = 5  # of those that could not be read
_TEMPLATES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def replay(document: Document) -> list[RenderableType]:
    arms = (
        {
            **arm,
            **document["times"]["arms"][arm["label"]],
            "saved_ms": arm["ttft_saved_s"]["mean"] * 1000,
            "stored_gb": arm["storage"]["final_bytes"] / 1e9,
            "false_hits": f"{arm['num_false_hits']:,} of {arm['num_answered']:,}"
            if arm["num_answered"]
            else "",
        }
        for arm in document["arms"]
    )
    return [_say("replay", document), *_unreadable(document), _table("arms", arms)]


def diff(document: Document) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for arm in document["arms"]:
        figures = (
            {
                **figure,
                **{name: 100 * figure[name] for name in ("difference", "low", "high")},
                "name": figure["name"].replace("_", " "),
                "verdict": "differs" if figure["differs"] else "",
            }
            for figure in arm["figures"]
        )
        parts.append(_table("figures", figures, title=arm["label"]))
    for side in ("a", "b"):
        if missing := document[f"only_in_{side}"]:
            parts.append(_say("only", {"side": side, "arms": ", ".join(missing)}))
    return parts or ["no arm is in both runs"]


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
    arms = (
        {**arm, **{f"at_least_{share}": of_all for share, of_all in arm["at_least"].items()}}
        for arm in document["figure_4"]["arms"]
    )
    return [_say("paper", document), *_unreadable(document), _table("subset", arms)]


def _unreadable(document: Document) -> list[RenderableType]:
    """Where the first rows stand that could not be read, and why."""
    unreadable = document["data"]["unreadable"]
    lines = unreadable["lines"][:_NUM_LINES]
    if not lines:
        return []
    num_more = unreadable["num_rows"] - len(lines)
    return [
        _say("unreadable", unreadable),
        *(_say("line", line) for line in lines),
        *([_say("more", {"num_more": num_more})] if num_more else []),
    ]


class _Filler(Formatter):
    """Fills the templates; a percent sign stands apart from its number."""

    def format_field(self, value: Any, format_spec: str) -> str:
        text = str(super().format_field(value, format_spec))
        return text.replace("%", " %") if format_spec.endswith("%") else text


def _fill(template: str, document: Document) -> str:
    return _Filler().vformat(template, (), document)


def _say(name: str, document: Document) -> Text:
    """One line, taken as it is: no markup is read out of the document."""
    return Text(_fill(_TEMPLATES[name], document))


def _table(name: str, rows: Iterable[Document], *, title: str | None = None) -> Table:
    """Names to the left, numbers to the right."""
    columns = _TEMPLATES[name]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in ("arm", "figure", "prediction") else "right")
    for row in rows:
        table.add_row(*(_fill(template, row) for template in columns.values()))
    return table
