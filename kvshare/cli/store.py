"""`kvshare stats`, `tree`, `node`, `diff` and `evict`: the store of a running server or of a stopped one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from kvshare.cli.options import Config, Format, Key, NamespaceDigest, OutputFormat, Store, Url
from kvshare.cli.output import note, show
from kvshare.cli.source import open_source

TreeOrder = Literal["bytes", "hits", "age", "tokens"]  # the heaviest, the busiest, the oldest, the longest


def stats(
    namespace: NamespaceDigest = None,
    url: Url = None,
    key: Key = None,
    store: Store = None,
    config: Config = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """How much is stored, in all and per namespace."""
    source = open_source(url=url, key=key, store=store, config=config)
    show("stats", source.ask("stats", _given(namespace=namespace)), output_format)


def tree(
    root: Annotated[int | None, typer.Argument(help="Only this node and what hangs below it.")] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Levels shown.")] = 4,
    sort: Annotated[TreeOrder, typer.Option("--sort", help="Which siblings come first.")] = "bytes",
    namespace: NamespaceDigest = None,
    url: Url = None,
    key: Key = None,
    store: Store = None,
    config: Config = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """The stored prompts as a tree. Who was edited from whom, and what that costs."""
    source = open_source(url=url, key=key, store=store, config=config)
    arguments = _given(root=root, depth=depth, sort=sort, namespace=namespace)
    show("tree", source.ask("tree", arguments), output_format)


def node(
    node_id: Annotated[int, typer.Argument(metavar="ID", help="A node of `kvshare tree`.")],
    url: Url = None,
    key: Key = None,
    store: Store = None,
    config: Config = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """One stored prompt. Its parents, its edits, where its KV lies and who shares it; never its text."""
    source = open_source(url=url, key=key, store=store, config=config)
    show("node", source.ask("node", {"id": node_id}), output_format)


def diff(
    a: Annotated[int, typer.Argument(help="The node to start from.")],
    b: Annotated[int, typer.Argument(help="The node to arrive at.")],
    min_run: Annotated[
        int, typer.Option("--min-run", min=1, help="A shorter match counts as a change; see sharing.min_run.")
    ] = 1,
    url: Url = None,
    key: Key = None,
    store: Store = None,
    config: Config = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """The edits between two stored prompts, as spans and counts."""
    source = open_source(url=url, key=key, store=store, config=config)
    show("diff", source.ask("diff", {"a": a, "b": b, "min_run": min_run}), output_format)


def evict(
    node_id: Annotated[int | None, typer.Argument(metavar="[ID]", help="The node to drop.")] = None,
    namespace: NamespaceDigest = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Really drop a whole namespace or everything.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be freed.")] = False,
    url: Url = None,
    key: Key = None,
    store: Store = None,
    config: Config = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Drop stored prompts and the KV that nobody else uses. More than one node: a dry run unless --yes."""
    target = _given(node=node_id, namespace=namespace, all=True if everything else None)
    if len(target) != 1:
        raise typer.BadParameter("expected exactly one of ID, --namespace and --all")
    if yes and dry_run:
        raise typer.BadParameter("expected either --yes or --dry-run")
    only_show = dry_run or (node_id is None and not yes)
    source = open_source(url=url, key=key, store=store, config=config)
    show("evict", source.ask("evict", {**target, "dry_run": only_show}), output_format)
    if only_show:
        note("dry run: nothing was dropped" + ("" if dry_run else "; add --yes to do it"))


def _given(**arguments: object) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
