"""
How documents look on a terminal: their columns and lines are in views.yaml. Draws what it is given; asks and
computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path

import typer
import yaml
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvshare.cli import gpu_view, replay_views
from kvshare.cli.templates import Document, Templates

_WIDTH_OFF_TERMINAL = 140
_MOST_INDENTED = 4  # levels; what is further below is indented as much
_STATE_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_TEMPLATES = Templates(Path(__file__).with_suffix(".yaml"))


def draw(view: str, document: Document, *, width: int | None = None) -> None:
    """
    Write the document to stdout; colours only on a terminal and without NO_COLOR.

    `width`: columns; None is the terminal's, which is at least 80.
    """
    console = Console(highlight=False)
    if width is not None or not console.is_terminal:
        console.width = width or _WIDTH_OFF_TERMINAL
    with console.capture() as captured:
        for part in VIEWS[view](document):
            console.print(part)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def stats(document: Document) -> list[RenderableType]:
    total = {"namespace": "all", **document["totals"]}
    parts: list[RenderableType] = [_TEMPLATES.table("stats", document["namespaces"], total=total)]
    if "pins" in document:  # of a server that runs, as is what follows
        parts.append(_TEMPLATES.say("pins", document["pins"]))
    if (costs := document.get("costs")) is not None:
        pays = costs["break_even_tokens"]
        what = "a plan never pays" if pays is None else f"a plan pays from {pays:,} tokens on"
        parts.append(
            f"{_origin(costs)}: prefill {costs['prefill_tokens_per_s']:,.0f} tokens/s, "
            f"load {costs['load_bytes_per_s'] / 1e9:.1f} GB/s, {costs['pass_s'] * 1000:.1f} ms a pass; "
            f"{what} if a tenth is computed"
        )
    return parts


def _origin(costs: Document) -> str:
    """Whether these rates were measured."""
    measured = costs["measured"]
    if not measured:
        return "assumed until measured"
    return "measured" if len(measured) == 2 else f"only {measured[0]} measured"


def tree(document: Document) -> list[RenderableType]:
    """A table for each namespace; prompts are indented below those that they were edited from."""
    if not document["roots"]:
        return ["the store is empty"]
    parts: list[RenderableType] = []
    for namespace in dict.fromkeys(root["namespace"] for root in document["roots"]):
        roots = [root for root in document["roots"] if root["namespace"] == namespace]
        rows = [row for root in roots for row in _branch(root, level=0)]
        parts += [f"[bold]namespace {namespace:.12}[/]", _TEMPLATES.table("tree", rows), ""]
    return parts[:-1]


def node(document: Document) -> list[RenderableType]:
    words = {
        "pinned": "yes" if document["pinned"] else "no",
        "parents": " < ".join(map(str, document["parents"])) or "none: a root",
        "children": ", ".join(map(str, document["children"])) or "none",
    }
    parts: list[RenderableType] = [_facts(_TEMPLATES.cells("node", {**document, **words}))]
    if document["edits"] is not None:
        parts += ["\n[bold]edits of the parent[/]", _edit_table(document["edits"])]
    parts += ["\n[bold]pieces[/]", _TEMPLATES.table("pieces", document["pieces"])]
    return [*parts, "", _TEMPLATES.table("shared", shared)] if (shared := document["shared_with"]) else parts


def diff(document: Document) -> list[RenderableType]:
    return [_TEMPLATES.say("diff", document), _edit_table(document["edits"])]


def evict(document: Document) -> list[RenderableType]:
    verb = "would evict" if document["dry_run"] else "evicted"
    line = "evict unreadable" if "unreadable" in document else "evict"
    return [_TEMPLATES.say(line, {**document, "verb": verb})]


def explain(document: Document) -> list[RenderableType]:
    num_tokens, reason = document["num_tokens"], document["reason"]
    kinds = [
        {"kind": kind, "count": document[kind], "share": document[kind] / max(num_tokens, 1)}
        for kind in ("exact", "copied", "recomputed", "repaired")
    ]
    spans = [{**span, "length": span["end"] - span["start"]} for span in document["spans"]]
    donors = [{**donor, "found_by": ", ".join(donor["sources"])} for donor in document["donors"]]
    predicted = document.get("prediction")
    parts: list[RenderableType] = [
        f"[bold]{document['decision']}[/]" + (f": {escape(reason)}" if reason else ""),
        *([escape(missed["message"])] if (missed := document.get("cache_miss_reason")) else []),
        *([f"rules that acted: {', '.join(rules)}"] if (rules := document.get("rules")) else []),
        _TEMPLATES.table("kinds", kinds, total={"kind": "all", "count": num_tokens, "share": None}),
        _TEMPLATES.say("explain", document),
        *([_TEMPLATES.say("explain prediction", predicted)] if predicted else []),
        "\n[bold]spans[/]",
        _TEMPLATES.table("spans", spans),
        "\n[bold]donors[/]",
        _TEMPLATES.table("donors", donors) if donors else "none was nominated",
    ]
    stages = ", ".join(f"{name} {value:.2f} ms" for name, value in document["stage_ms"].items())
    return [*parts, f"\nplanned in: {stages}"] if stages else parts


def warm(document: Document) -> list[RenderableType]:
    """The sums; then what failed, and which prompt is which node where it was pinned."""
    parts: list[RenderableType] = [_facts(_TEMPLATES.cells("warm", document))]
    if failures := [_with_label(entry) for entry in document["failures"]]:
        parts += ["\n[bold]failed[/]", _TEMPLATES.table("warm failures", failures)]
    if nodes := [_with_label(entry) for entry in document["prompts"] if entry["pinned"]]:
        parts += ["\n[bold]pinned[/]", _TEMPLATES.table("warm nodes", nodes)]
    return parts


def _with_label(entry: Document) -> Document:
    """What a user wrote is no markup."""
    return {**entry, "file": escape(entry["file"]), "label": escape(entry["label"] or "")}


def verify(document: Document) -> list[RenderableType]:
    """Layers that are alike in one row."""
    if document["shares"] == "nothing":
        return [_TEMPLATES.say("verify nothing", document)]
    alike: dict[tuple[object, ...], list[Document]] = {}
    for layer in document["layers"]:
        for rows in layer["rows"]:
            found = {**rows, "layer": layer["layer"], "sees": layer["sees"]}
            found["moves"] = rows["moves"] or f"not known: {rows['why']}"
            key = tuple(found[name] for name in ("name", "heads", "dim", "moves", "sees"))
            alike.setdefault(key, []).append(found)
    table = (
        {
            **group[0],
            "layers": _ranges([rows["layer"] for rows in group]),
            "error": max(rows["error"] for rows in group),
            "control": _times(min(inf if rows["control"] is None else rows["control"] for rows in group)),
        }
        for group in alike.values()
    )
    why = [_TEMPLATES.say("verify why", document)] if document["why"] else []
    return [_TEMPLATES.say("verify", document), *why, "", _TEMPLATES.table("verified", table)]


def _times(control: float) -> str:
    return "" if control == inf else f"{control:,.0f}x"


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 5, 7-8"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def doctor(document: Document) -> list[RenderableType]:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in document["checks"]:
        state = Text(check["state"], style=_STATE_STYLE[check["state"]])
        remedy = f"\n[dim]-> {escape(check['remedy'])}[/]" if check["remedy"] else ""
        table.add_row(state, check["name"], escape(check["detail"]) + remedy)
    return [table]


def version(document: Document) -> list[RenderableType]:
    libraries = {name: found or "not installed" for name, found in document["libraries"].items()}
    return [_facts({"kvshare": document["kvshare"], "python": document["python"], **libraries})]


def key(document: Document) -> list[RenderableType]:
    return [_facts(document)] if "key" in document else [document["sha256"]]


def settings(document: Document) -> list[RenderableType]:
    """As YAML, so that it can be saved and given back with --config."""
    return [Text(yaml.safe_dump(dict(document), sort_keys=False).rstrip())]


def bench(document: Document) -> list[RenderableType]:
    if document["benchmark"] == "gpu":
        return gpu_view.gpu(document)
    return [_facts(dict(_flat(document)))]


def _line(name: str, document: Document) -> list[RenderableType]:
    return [_TEMPLATES.say(name, document)]


def _facts(rows: Mapping[str, object]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(str(value)))
    return table


def _branch(entry: Document, level: int) -> Iterator[Document]:
    """A prompt's row, then those of what is below it."""
    indent = "  " * min(level, _MOST_INDENTED)
    yield {**entry, "prompt": f"{indent}{entry['id']}", "state": "pinned" if entry["pinned"] else ""}
    for child in entry["children"]:
        yield from _branch(child, level + 1)
    if hidden := entry["num_children"] - len(entry["children"]):
        counted = dict.fromkeys((*entry, "state"))
        yield {**counted, "prompt": f"{indent}  {hidden} more"}


def _edit_table(edits: Document) -> RenderableType:
    ends = ((edit, edit["source"], edit["target"]) for edit in edits["ops"])
    rows = ({**edit, "length": max(a[1] - a[0], b[1] - b[0])} for edit, a, b in ends)
    return _TEMPLATES.table("edits", rows)


def _flat(document: Document, at: str = "") -> list[tuple[str, str]]:
    """Nested keys as dotted paths."""
    rows: list[tuple[str, str]] = []
    for name, value in document.items():
        if isinstance(value, Mapping):
            rows += _flat(value, at=f"{at}{name}.")
        elif isinstance(value, Sequence) and value and all(isinstance(entry, Mapping) for entry in value):
            for index, entry in enumerate(value):
                rows += _flat(entry, at=f"{at}{name}.{index}.")
        else:
            rows.append((f"{at}{name}", f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows


_OWN = (*(stats, tree, node, diff, evict, explain, warm, verify, doctor, version, key, settings, bench),)
VIEWS: Mapping[str, Callable[[Document], list[RenderableType]]] = {
    **{view.__name__: view for view in _OWN},
    **{name: partial(_line, name) for name in ("pin", "unpin", "ready")},
    "replay": replay_views.replay,
    "replay-diff": replay_views.diff,
    "replay-live": replay_views.live,
    "replay-paper": replay_views.paper,
}
"""Keyed by what `output.show` is asked for."""
