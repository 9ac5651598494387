"""
`kvshare stats`, `tree`, `node`, `diff`, `explain`, `evict`, `pin`: of a running server, or of the metadata of
a stopped one. Both answer alike.

Commands get `ask(what, arguments)`, which shows the document of a question: a key of
`kvshare.admin.QUESTIONS`, or "explain" with a request. An argument of None is as good as not given.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

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
from kvshare.errors import StoreError

Api = Literal["chat", "completions", "responses", "messages"]
TreeOrder = Literal["bytes", "hits", "age", "tokens"]  # the heaviest, the busiest, the oldest, the longest
Source = Callable[[str, Mapping[str, Any]], dict[str, Any]]
Ask = Callable[[str, Mapping[str, Any]], None]


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter, an `Ask`, asks and shows; it gets the options that this needs."""

    def with_source(
        *,
        url: Url = None,
        key: Key = None,
        store: Store = None,
        config: Config = None,
        output_format: Format = OutputFormat.TERMINAL,
        **own: Any,
    ) -> None:
        ask = source(url=url, key=key, store=store, config=config)
        command(lambda what, arguments: show(what, ask(what, arguments), output_format), **own)

    shared = signature(with_source, eval_str=True)
    own = signature(command, eval_str=True).parameters.values()
    options = [*list(own)[1:], *(each for each in shared.parameters.values() if each.name != "own")]
    with_source.__signature__ = shared.replace(parameters=options)  # type: ignore[attr-defined]  # has one
    with_source.__doc__ = command.__doc__
    return with_source


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

        return AdminClient(checked_url(url, "--url"), key=key or os.environ.get("KVSHARE_ADMIN_KEY")).ask
    from kvshare.settings import load_settings

    path = store or load_settings(config).store.path
    if path is None:
        raise StoreError("store.path is null: the server has its store in memory; ask it with --url")
    return partial(_ask_store, Path(path), config)


def _ask_store(folder: Path, config: Path | None, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the metadata of a stopped server. Evicting and unpinning write; explaining needs its config."""
    if what == "explain":
        if "api" in arguments:
            raise StoreError("other requests than chats are explained by a running server: use --url")
        from kvshare.cli.explain_offline import explain_offline
        from kvshare.settings import load_settings

        return explain_offline(folder, load_settings(config), arguments["messages"])
    if what == "pin":
        raise StoreError("how much may be pinned is known to a running server only: ask it with --url")
    from kvshare.admin import QUESTIONS
    from kvshare.metadata import METADATA_FILE, UnreadableStoreError, opened

    path = folder / METADATA_FILE
    read_only = what not in ("evict", "unpin") or bool(arguments.get("dry_run"))
    whole = what == "evict" and bool(arguments["all"])
    drop_file = whole and not read_only  # also forgets for which model it was written
    try:
        with opened(path, read_only=read_only) as tree:
            document = QUESTIONS[what](tree, arguments).document
            if drop_file:
                _delete(path)  # while it is locked
    except UnreadableStoreError as exc:
        if not whole:
            raise
        if drop_file:
            _delete(path)
        document = {"dry_run": read_only, "unreadable": exc.problem}
    return document


def _delete(path: Path) -> None:
    """Also what a server moved aside: it holds prompts as well."""
    for name in (path.name, f"{path.name}.old"):
        for suffix in ("", "-journal", "-wal", "-shm"):
            path.with_name(name + suffix).unlink(missing_ok=True)
