"""`kvshare stats`, `tree`, `node`, `diff`, `explain`, `evict`, `pin`: of a running or a stopped server."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from kvshare.cli.options import NamespaceDigest
from kvshare.cli.output import note
from kvshare.cli.source import Ask, asking

TreeOrder = Literal["bytes", "hits", "age", "tokens"]  # the heaviest, the busiest, the oldest, the longest


@asking
def stats(ask: Ask, namespace: NamespaceDigest = None) -> None:
    """How much is stored, in all and per namespace."""
    ask("stats", {"namespace": namespace})


@asking
def tree(
    ask: Ask,
    root: Annotated[int | None, typer.Argument(help="Only this node and what hangs below it.")] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Levels shown.")] = 4,
    sort: Annotated[TreeOrder, typer.Option("--sort", help="Which siblings come first.")] = "bytes",
    namespace: NamespaceDigest = None,
) -> None:
    """The stored prompts as a tree. Who was edited from whom, and what that costs."""
    ask("tree", {"root": root, "depth": depth, "sort": sort, "namespace": namespace})


@asking
def node(
    ask: Ask, node_id: Annotated[int, typer.Argument(metavar="ID", help="A node of `kvshare tree`.")]
) -> None:
    """One stored prompt. Its parents, its edits, where its KV lies and who shares it; never its text."""
    ask("node", {"id": node_id})


@asking
def diff(
    ask: Ask,
    a: Annotated[int, typer.Argument(help="The node to start from.")],
    b: Annotated[int, typer.Argument(help="The node to arrive at.")],
    min_run: Annotated[
        int, typer.Option("--min-run", min=1, help="A shorter match counts as a change; see sharing.min_run.")
    ] = 1,
) -> None:
    """The edits between two stored prompts, as spans and counts."""
    ask("diff", {"a": a, "b": b, "min_run": min_run})


@asking
def evict(
    ask: Ask,
    node_id: Annotated[int | None, typer.Argument(metavar="[ID]", help="The node to drop.")] = None,
    namespace: NamespaceDigest = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Really drop a whole namespace or everything.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be freed.")] = False,
) -> None:
    """Drop stored prompts and the KV that nobody else uses. More than one node: a dry run unless --yes."""
    if (node_id is not None) + (namespace is not None) + everything != 1:
        raise typer.BadParameter("expected exactly one of ID, --namespace and --all")
    if yes and dry_run:
        raise typer.BadParameter("expected either --yes or --dry-run")
    only_show = dry_run or (node_id is None and not yes)
    ask("evict", {"node": node_id, "namespace": namespace, "all": everything, "dry_run": only_show})
    if only_show:
        note("dry run: nothing was dropped" + ("" if dry_run else "; add --yes to do it"))


@asking
def pin(
    ask: Ask,
    node_id: Annotated[int | None, typer.Argument(metavar="[ID]", help="The node to pin.")] = None,
    namespace: NamespaceDigest = None,
) -> None:
    """Keep a stored prompt from eviction, or all that a namespace has now. At most half of the memory."""
    if (node_id is None) == (namespace is None):
        raise typer.BadParameter("expected exactly one of ID and --namespace")
    ask("pin", {"node": node_id, "namespace": namespace})


@asking
def unpin(
    ask: Ask,
    node_id: Annotated[int | None, typer.Argument(metavar="[ID]", help="The node to unpin.")] = None,
    namespace: NamespaceDigest = None,
    everything: Annotated[bool, typer.Option("--all", help="Every pinned prompt.")] = False,
) -> None:
    """Let pinned prompts be evicted again when there is no room. Nothing is dropped now."""
    if (node_id is not None) + (namespace is not None) + everything != 1:
        raise typer.BadParameter("expected exactly one of ID, --namespace and --all")
    ask("unpin", {"node": node_id, "namespace": namespace, "all": everything})


@asking
def explain(
    ask: Ask,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="One user message.")] = None,
    file: Annotated[
        typer.FileText | None,
        typer.Option(
            "--file",
            "-f",
            metavar="<path>",
            encoding="utf-8",
            help="A chat request or its messages as JSON; - reads stdin.",
        ),
    ] = None,
) -> None:
    """The plan that a prompt would get. Which donors, why not others, what is copied and computed."""
    if (prompt is None) == (file is None):
        raise typer.BadParameter("expected exactly one of --prompt and --file")
    one_turn = {"messages": [{"role": "user", "content": prompt}]}
    ask("explain", one_turn if file is None else _read_request(file))


def _read_request(file: typer.FileText) -> dict[str, Any]:
    """A request with `messages` from a file that holds the request, or only the messages."""
    try:
        document = json.load(file)
    except (OSError, ValueError) as exc:
        raise typer.BadParameter(f"{file.name} cannot be read as JSON: {exc}", param_hint="--file") from exc
    request = {"messages": document} if isinstance(document, list) else document
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise typer.BadParameter(
            f'{file.name}: expected a list of messages or an object with "messages"', param_hint="--file"
        )
    return request
