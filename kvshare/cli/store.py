"""
`kvshare stats`, `tree`, `node`, `diff`, `explain`, `evict`, `pin`: of a running server, or of the metadata of
a stopped one. Both answer alike: a `Source` is either.
"""

import json
import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshare.cli.options import (
    Config,
    Format,
    Key,
    NamespaceDigest,
    OutputFormat,
    Store,
    Url,
    argument,
    checked_url,
    option,
)
from kvshare.cli.output import note, show
from kvshare.cli.source import Api, Document, Source, TreeOrder
from kvshare.errors import StoreError


def with_source(command: Callable[..., Document | tuple[Document, str]]) -> Callable[..., None]:
    """
    A command that chooses a `Source` by its options, hands it to `command`, and shows the document.

    `command` may also return a remark, which is shown after it.
    """

    def run(
        *,
        url: Url = None,
        key: Key = None,
        store: Store = None,
        config: Config = None,
        output_format: Format = OutputFormat.TERMINAL,
        **own: Any,
    ) -> None:
        answer = command(source(url=url, key=key, store=store, config=config), **own)
        document, remark = answer if isinstance(answer, tuple) else (answer, None)
        show(command.__name__, document, output_format)
        if remark is not None:
            note(remark)

    shared = signature(run, eval_str=True)
    own = signature(command, eval_str=True).parameters.values()
    options = [*list(own)[1:], *(each for each in shared.parameters.values() if each.name != "own")]
    run.__signature__ = shared.replace(parameters=options)  # type: ignore[attr-defined]  # has one
    run.__doc__ = command.__doc__
    return run


@with_source
def stats(origin: Source, namespace: NamespaceDigest = None) -> Document:
    """How much is stored, in all and per namespace."""
    return origin.stats(namespace=namespace)


@with_source
def tree(
    origin: Source,
    root: Annotated[int | None, argument("tree", "root")] = None,
    depth: Annotated[int, option("tree", "--depth", min=1)] = 4,
    sort: Annotated[TreeOrder, option("tree", "--sort")] = "bytes",
    namespace: NamespaceDigest = None,
) -> Document:
    """Stored prompts, each below the one that it was edited from, and the KV that they hold."""
    return origin.tree(root=root, depth=depth, sort=sort, namespace=namespace)


@with_source
def node(origin: Source, node_id: Annotated[int, argument("node", "node_id", metavar="ID")]) -> Document:
    """One stored prompt. Its parents, edits, pieces of KV and the prompts that share it; never its text."""
    return origin.node(node_id)


@with_source
def diff(
    origin: Source,
    a: Annotated[int, argument("diff", "a")],
    b: Annotated[int, argument("diff", "b")],
    min_run: Annotated[int, option("diff", "--min-run", min=1)] = 1,
) -> Document:
    """The edits between two stored prompts, as spans and counts."""
    return origin.diff(a, b, min_run=min_run)


@with_source
def evict(
    origin: Source,
    node_id: Annotated[int | None, argument("evict", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
    everything: Annotated[bool, option("evict", "--all")] = False,
    yes: Annotated[bool, option("evict", "--yes", "-y")] = False,
    dry_run: Annotated[bool, option("evict", "--dry-run", "-n")] = False,
) -> Document | tuple[Document, str]:
    """Evict stored prompts, and free KV that no other prompt uses. More than one needs --yes."""
    if (node_id is not None) + (namespace is not None) + everything != 1:
        raise typer.BadParameter("expected exactly one of ID, --namespace and --all")
    if yes and dry_run:
        raise typer.BadParameter("expected either --yes or --dry-run")
    only_show = dry_run or (node_id is None and not yes)
    document = origin.evict(node=node_id, namespace=namespace, everything=everything, dry_run=only_show)
    if not only_show:
        return document
    return document, "dry run: nothing was evicted" + ("" if dry_run else "; add --yes to do it")


@with_source
def pin(
    origin: Source,
    node_id: Annotated[int | None, argument("pin", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
) -> Document:
    """Protect stored prompts from eviction: one, or all that a namespace has now. At most half of the KV."""
    if (node_id is None) == (namespace is None):
        raise typer.BadParameter("expected exactly one of ID and --namespace")
    return origin.pin(node=node_id, namespace=namespace)


@with_source
def unpin(
    origin: Source,
    node_id: Annotated[int | None, argument("unpin", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
    everything: Annotated[bool, option("unpin", "--all")] = False,
) -> Document:
    """Allow the eviction of pinned prompts again. Nothing is evicted now."""
    if (node_id is not None) + (namespace is not None) + everything != 1:
        raise typer.BadParameter("expected exactly one of ID, --namespace and --all")
    return origin.unpin(node=node_id, namespace=namespace, everything=everything)


@with_source
def explain(
    origin: Source,
    prompt: Annotated[str | None, option("explain", "--prompt", "-p")] = None,
    file: Annotated[
        typer.FileText | None, option("explain", "--file", "-f", metavar="<path>", encoding="utf-8")
    ] = None,
    api: Annotated[Api, option("explain", "--api")] = "chat",
) -> Document:
    """Show the plan that a prompt would get: its donors, why others were not used, what is computed."""
    if (prompt is None) == (file is None):
        raise typer.BadParameter("expected exactly one of --prompt and --file")
    one_turn = {"messages": [{"role": "user", "content": prompt}]}
    if file is None and api != "chat":
        raise typer.BadParameter("expected --file with a request of this API", param_hint="--api")
    request = one_turn if file is None else _read_request(file, is_chat=api == "chat")
    return origin.explain(request, api=api)


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


def source(*, url: str | None, key: str | None, store: Path | None, config: Path | None) -> Source:
    """
    The server at --url or KVSHARE_URL, else the store at --store or in the settings. Opens nothing yet.

    Raises:  a usage error for both at once or for a URL that is none; StoreError if there is no such store
    """
    if url is not None and store is not None:
        raise typer.BadParameter("expected either --url (a running server) or --store (a stopped one)")
    if store is None:
        url = url or os.environ.get("KVSHARE_URL")
    if url is not None:
        from kvshare.cli.client import AdminClient

        return AdminClient(checked_url(url, "--url"), key=key or os.environ.get("KVSHARE_ADMIN_KEY"))
    from kvshare.settings import load_settings

    path = store or load_settings(config).store.path
    if path is None:
        raise StoreError("store.path is null: the server has its store in memory; ask it with --url")
    from kvshare.cli.stopped_store import StoppedStore

    return StoppedStore(Path(path), config)
