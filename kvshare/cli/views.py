"""How documents look on a terminal. Draws what it is given; asks and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvshare.cli import replay_views

Document = Mapping[str, Any]

_WIDTH_OFF_TERMINAL = 140
_SHORT_DIGEST = 12
_STATE_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def draw(view: str, document: Document) -> None:
    """Write the document to stdout; colours only on a terminal and without NO_COLOR."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OFF_TERMINAL
    with console.capture() as captured:
        for part in VIEWS[view](document):
            console.print(part)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def stats(document: Document) -> list[RenderableType]:
    columns = ("namespace", "nodes", "pinned", "depth", "tokens", "stored tokens", "segments", "KV")
    namespaces = document["namespaces"]
    table = _table(columns, ((each["namespace"][:_SHORT_DIGEST], *_stats_cells(each)) for each in namespaces))
    table.add_section()
    table.add_row("all", *_stats_cells(document["totals"]))
    return [table]


def tree(document: Document) -> list[RenderableType]:
    if not document["roots"]:
        return ["the store is empty"]
    return [_branch(root, Tree(_node_label(root))) for root in document["roots"]]


def node(document: Document) -> list[RenderableType]:
    own, subtree = _bytes(document["own_bytes"]), _bytes(document["subtree_bytes"])
    facts = _facts(
        {
            "node": document["id"],
            "namespace": document["namespace"],
            "tokens": f"{document['num_tokens']:,}, {document['exact_length']:,} exact",
            "KV": f"{own} own, {subtree} with what is below",
            "used": f"{_counted(document['num_hits'], 'hit')}, last {_ago(document['idle_s'])}",
            "stored": _ago(document["age_s"]),
            "pinned": "yes" if document["pinned"] else "no",
            "parents": " < ".join(str(parent) for parent in document["parents"]) or "none: a root",
            "children": ", ".join(str(child) for child in document["children"]) or "none",
        }
    )
    parts: list[RenderableType] = [facts]
    if document["edits"] is not None:
        parts += ["\n[bold]edits of the parent[/]", _edit_table(document["edits"])]
    columns = ("positions", "segment", "offset", "shift", "generation", "references", "bytes")
    pieces = (
        (
            *(_span(piece["start"], piece["end"]), piece["segment"], str(piece["offset"])),
            *(f"{piece['shift']:+d}", str(piece["generation"]), str(piece["num_references"])),
            _bytes(piece["num_bytes"]),
        )
        for piece in document["pieces"]
    )
    parts += ["\n[bold]pieces[/]", _table(columns, pieces)]
    if shared := document["shared_with"]:
        rows = ((str(entry["id"]), f"{entry['num_tokens']:,}") for entry in shared)
        parts += ["", _table(("shares with node", "tokens"), rows)]
    return parts


def diff(document: Document) -> list[RenderableType]:
    edits = document["edits"]
    counts = edits["counts"]
    summary = (
        f"{document['a']} -> {document['b']}: {counts['keep']:,} tokens kept "
        f"({document['kept_share_of_a']:.1%} of the first, {document['kept_share_of_b']:.1%} of the second), "
        f"{document['num_common_prefix']:,} of them as common prefix"
    )
    return [summary, _edit_table(edits)]


def evict(document: Document) -> list[RenderableType]:
    verb = "would drop" if document["dry_run"] else "dropped"
    if "unreadable" in document:
        return [Text(f"{verb} the whole file, which cannot be read: {document['unreadable']}")]
    nodes = _counted(document["num_nodes"], "node")
    segments = _counted(document["num_segments"], "segment")
    return [f"{verb} {nodes} and {segments}, {_bytes(document['freed_bytes'])} of KV"]


def explain(document: Document) -> list[RenderableType]:
    total = max(document["num_tokens"], 1)
    parts: list[RenderableType] = [f"[bold]{document['decision']}[/]" + _because(document["reason"])]
    shares = {kind: document[kind] for kind in ("exact", "copied", "recomputed", "repaired")}
    rows = ((kind, f"{count:,}", f"{count / total:.1%}") for kind, count in shares.items())
    kinds = _table(("tokens", "count", "share"), rows)
    kinds.add_section()
    kinds.add_row("all", f"{document['num_tokens']:,}", "")
    parts.append(kinds)
    estimate = document["estimate"]
    parts.append(
        f"expected: {_seconds(estimate['shared_s'])} instead of {_seconds(estimate['full_s'])}, "
        f"saves {_seconds(estimate['saved_s'])}; charged budget {document['charged_budget']:.1%}"
    )
    parts += ["\n[bold]spans[/]", _span_table(document["spans"])]
    parts += ["\n[bold]donors[/]", _donor_table(document["donors"])]
    stages = ", ".join(f"{name} {value:.2f} ms" for name, value in document["stage_ms"].items())
    return [*parts, f"\nplanned in: {stages}"] if stages else parts


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
    import yaml

    return [Text(yaml.safe_dump(dict(document), sort_keys=False).rstrip())]


def ready(document: Document) -> list[RenderableType]:
    model = escape(document["model"])
    return [f"KVShare listening on {document['url']} (model {model}, ready in {document['ready_s']:.1f} s)"]


def bench(document: Document) -> list[RenderableType]:
    return [_facts(dict(_flat(document)))]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The first column to the left, the others to the right."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _facts(rows: Mapping[str, object]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(str(value)))
    return table


def _stats_cells(entry: Document) -> tuple[str, ...]:
    names = ("num_nodes", "num_pinned", "max_depth", "num_tokens", "num_stored_tokens", "num_segments")
    return (*(f"{entry[name]:,}" for name in names), _bytes(entry["num_bytes"]))


def _branch(entry: Document, into: Tree) -> Tree:
    for child in entry["children"]:
        _branch(child, into.add(_node_label(child)))
    hidden = entry["num_children"] - len(entry["children"])
    if hidden:
        into.add(f"[dim]... {hidden} more below; see --depth[/]")
    return into


def _node_label(entry: Document) -> str:
    pin = " [yellow]pinned[/]" if entry["pinned"] else ""
    return (
        f"[bold]{entry['id']}[/]  {entry['num_tokens']:,} tokens ({entry['exact_length']:,} exact)  "
        f"{_bytes(entry['own_bytes'])} own / {_bytes(entry['subtree_bytes'])}  "
        f"{_counted(entry['num_hits'], 'hit')}  {_ago(entry['idle_s'])}{pin}"
    )


def _edit_table(edits: Document) -> Table:
    rows = []
    for edit in edits["ops"]:
        source, target = edit["source"], edit["target"]
        length = max(source[1] - source[0], target[1] - target[0])
        rows.append((edit["op"], _span(*source), _span(*target), f"{length:,}"))
    return _table(("edit", "from", "to", "tokens"), rows)


def _span_table(spans: Sequence[Document]) -> Table:
    rows = []
    for span in spans:
        start, end, donor, shift = (span[name] for name in ("start", "end", "donor", "shift"))
        said = ("" if donor is None else str(donor), "" if shift is None else f"{shift:+d}")
        rows.append((_span(start, end), f"{end - start:,}", span["kind"], *said))
    return _table(("positions", "tokens", "kind", "donor", "shift"), rows)


def _donor_table(donors: Sequence[Document]) -> RenderableType:
    if not donors:
        return "none was nominated"
    rows = []
    for donor in donors:
        similarity = "" if donor["similarity"] is None else f"{donor['similarity']:.3f}"
        found = (str(donor["node"]), ", ".join(donor["sources"]), f"{donor['score']:.3f}", similarity)
        rows.append((*found, f"{donor['tokens_used']:,}", donor["outcome"]))
    return _table(("node", "found by", "score", "similarity", "tokens used", "outcome"), rows)


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


def _because(reason: str | None) -> str:
    return f": {escape(reason)}" if reason else ""


def _span(start: int, end: int) -> str:
    return f"{start}-{end}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _seconds(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms" if abs(duration_s) < 1 else f"{duration_s:.2f} s"


def _ago(duration_s: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if duration_s >= length:
            return f"{duration_s / length:.0f} {unit} ago"
    return f"{duration_s:.0f} s ago"


_OWN = (stats, tree, node, diff, evict, explain, doctor, version, key, settings, ready, bench)
VIEWS: Mapping[str, Callable[[Document], list[RenderableType]]] = {
    **{view.__name__: view for view in _OWN},
    "replay": replay_views.replay,
    "replay-diff": replay_views.diff,
    "replay-live": replay_views.live,
    "replay-paper": replay_views.paper,
}
"""Keyed by what `output.show` is asked for."""
