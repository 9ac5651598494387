"""A server and its installation: its start, its checks, what warms it."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import yaml

from kvshare.cli.views.parts import Columns, Document, Parts, bold, cells, facts, findings, of, table
from kvshare.cli.views.units import number, size

_VERIFIED: Columns = {
    "layers": of("layers"),
    "rows": of("name"),
    "heads x dim": lambda row: f"{row['heads']}x{row['dim']}",
    "moves": of("moves"),
    "sees": of("sees"),
    "error": of("error", number, ".1g"),
    "wrong ones": lambda row: "" if row["control"] is None else f"{row['control']:,.0f}x",
}
_WARM: Columns = {
    **{
        name: of(name, number)
        for name in ("entries", "tokens", "computed", "exact", "copied", "stored", "known", "failed")
    },
    "seconds": of("seconds", number, ".1f"),
}
_PLACE: Columns = {"file": of("file"), "line": of("line"), "label": of("label")}
_WARM_FAILURES: Columns = {**_PLACE, "reason": of("reason")}
_WARM_NODES: Columns = {"node": of("node"), "tokens": of("tokens", number), **_PLACE}


def ready(document: Document) -> Parts:
    took = f"{document['ready_s']:.1f} s"
    yield f"KVShare listening on {document['url']} (model {document['model']}, ready in {took})"


def version(document: Document) -> Parts:
    libraries = {name: found or "not installed" for name, found in document["libraries"].items()}
    yield facts({"kvshare": document["kvshare"], "python": document["python"], **libraries})


def key(document: Document) -> Parts:
    yield facts(document) if "key" in document else document["sha256"]


def settings(document: Document) -> Parts:
    """As YAML, so that it can be saved and given back with --config."""
    yield yaml.safe_dump(dict(document), sort_keys=False).rstrip()


def doctor(document: Document) -> Parts:
    yield findings(document["checks"])


def verify(document: Document) -> Parts:
    shares, why = document["shares"], document["why"]
    model = f"{document['model']} ({document['dtype']}, {number(document['max_model_len'])} tokens"
    if shares == "nothing":
        yield f"{model}): shares nothing, and is served unshared; {why}"
        return
    error = number(document["attention_error"], ".1g")
    yield (
        f"{model}, {size(document['bytes_per_token'])} a token): shares {shares}; "
        f"repairs {document['repairs']}; its own attention and ours differ by {error} of the largest logit"
    )
    if why:
        yield why
    yield ""
    yield table(_VERIFIED, _alike(document["layers"]))


def _alike(layers: Sequence[Document]) -> Iterator[Document]:
    """Layers that are alike in one row, with the largest error and the smallest control."""
    alike: dict[tuple[object, ...], list[Document]] = {}
    for layer in layers:
        for rows in layer["rows"]:
            moves = rows["moves"] or f"not known: {rows['why']}"
            row = {**rows, "layer": layer["layer"], "sees": layer["sees"], "moves": moves}
            same = tuple(row[name] for name in ("name", "heads", "dim", "moves", "sees"))
            alike.setdefault(same, []).append(row)
    for group in alike.values():
        controls = [row["control"] for row in group if row["control"] is not None]
        yield {
            **group[0],
            "layers": _ranges([row["layer"] for row in group]),
            "error": max(row["error"] for row in group),
            "control": min(controls, default=None),
        }


def _ranges(numbers: Sequence[int]) -> str:
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def warm(document: Document) -> Parts:
    yield facts(cells(document, _WARM))
    if document["failures"]:
        yield from ("", bold("failed"), table(_WARM_FAILURES, document["failures"]))
    pinned = [prompt for prompt in document["prompts"] if prompt["pinned"]]
    if pinned:
        yield from ("", bold("pinned"), table(_WARM_NODES, pinned))
