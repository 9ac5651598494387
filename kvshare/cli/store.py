"""`kvshare stats`, `tree`, `node`, `diff`, `explain`, `evict`, `pin`: of a running or a stopped server."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from kvshare.cli.options import NamespaceDigest, argument, option
from kvshare.cli.output import note
from kvshare.cli.source import Ask, asking

Api = Literal["chat", "completions", "responses", "messages"]
TreeOrder = Literal["bytes", "hits", "age", "tokens"]  # the heaviest, the busiest, the oldest, the longest


@asking
def stats(ask: Ask, namespace: NamespaceDigest = None) -> None:
    """How much is stored, in all and per namespace."""
    ask("stats", {"namespace": namespace})


@asking
def tree(
    ask: Ask,
    root: Annotated[int | None, argument("tree", "root")] = None,
    depth: Annotated[int, option("tree", "--depth", min=1)] = 4,
    sort: Annotated[TreeOrder, option("tree", "--sort")] = "bytes",
    namespace: NamespaceDigest = None,
) -> None:
    """Stored prompts, each below the one that it was edited from, and the KV that they hold."""
    ask("tree", {"root": root, "depth": depth, "sort": sort, "namespace": namespace})


@asking
def node(ask: Ask, node_id: Annotated[int, argument("node", "node_id", metavar="ID")]) -> None:
    """One stored prompt. Its parents, edits, pieces of KV and the prompts that share it; never its text."""
    ask("node", {"id": node_id})


@asking
def diff(
    ask: Ask,
    a: Annotated[int, argument("diff", "a")],
    b: Annotated[int, argument("diff", "b")],
    min_run: Annotated[int, option("diff", "--min-run", min=1)] = 1,
) -> None:
    """The edits between two stored prompts, as spans and counts."""
    ask("diff", {"a": a, "b": b, "min_run": min_run})


@asking
def evict(
    ask: Ask,
    node_id: Annotated[int | None, argument("evict", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
    everything: Annotated[bool, option("evict", "--all")] = False,
    yes: Annotated[bool, option("evict", "--yes", "-y")] = False,
    dry_run: Annotated[bool, option("evict", "--dry-run", "-n")] = False,
) -> None:
    """Evict stored prompts, and free KV that no other prompt uses. More than one needs --yes."""
    if (node_id is not None) + (namespace is not None) + everything != 1:
        raise typer.BadParameter("expected exactly one of ID, --namespace and --all")
    if yes and dry_run:
        raise typer.BadParameter("expected either --yes or --dry-run")
    only_show = dry_run or (node_id is None and not yes)
    ask("evict", {"node": node_id, "namespace": namespace, "all": everything, "dry_run": only_show})
    if only_show:
        note("dry run: nothing was evicted" + ("" if dry_run else "; add --yes to do it"))


@asking
def pin(
    ask: Ask,
    node_id: Annotated[int | None, argument("pin", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
) -> None:
    """Protect stored prompts from eviction: one, or all that a namespace has now. At most half of the KV."""
    if (node_id is None) == (namespace is None):
        raise typer.BadParameter("expected exactly one of ID and --namespace")
    ask("pin", {"node": node_id, "namespace": namespace})


@asking
def unpin(
    ask: Ask,
    node_id: Annotated[int | None, argument("unpin", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
    everything: Annotated[bool, option("unpin", "--all")] = False,
) -> None:
    """Allow the eviction of pinned prompts again. Nothing is evicted now."""
    if (node_id is not None) + (namespace is not None) + everything != 1:
        raise typer.BadParameter("expected exactly one of ID, --namespace and --all")
    ask("unpin", {"node": node_id, "namespace": namespace, "all": everything})


@asking
def explain(
    ask: Ask,
    prompt: Annotated[str | None, option("explain", "--prompt", "-p")] = None,
    file: Annotated[
        typer.FileText | None, option("explain", "--file", "-f", metavar="<path>", encoding="utf-8")
    ] = None,
    api: Annotated[Api, option("explain", "--api")] = "chat",
) -> None:
    """Show the plan that a prompt would get: its donors, why others were not used, what is computed."""
    if (prompt is None) == (file is None):
        raise typer.BadParameter("expected exactly one of --prompt and --file")
    one_turn = {"messages": [{"role": "user", "content": prompt}]}
    if file is None and api != "chat":
        raise typer.BadParameter("expected --file with a request of this API", param_hint="--api")
    request = one_turn if file is None else _read_request(file, is_chat=api == "chat")
    ask("explain", {**request, **({} if api == "chat" else {"api": api})})


def _read_request(file: typer.FileText, *, is_chat: bool) -> dict[str, Any]:
    """A request from a file that holds the request or, of a chat, only its messages."""
    try:
        document = json.load(file)
    except (OSError, ValueError) as exc:
        raise typer.BadParameter(f"{file.name} cannot be read as JSON: {exc}", param_hint="--file") from exc
    request = {"messages": document} if isinstance(document, list) else document
    if not isinstance(request, dict) or (is_chat and not isinstance(request.get("messages"), list)):
        expected = 'a list of messages or an object with "messages"' if is_chat else "an object"
        raise typer.BadParameter(f"{file.name}: expected {expected}", param_hint="--file")
    return request
