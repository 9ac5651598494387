"""
`kvshare stats`, `tiers`, `tree`, `node`, `diff`, `explain`, `evict`, `pin`: of a running server, or of the
metadata of a stopped one. Both answer alike: a `Source` is either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvshare.cli.options import (
    Config,
    Format,
    Key,
    NamespaceDigest,
    OutputFormat,
    Store,
    TenantName,
    Url,
    argument,
    checked_url,
    option,
    seconds,
)
from kvshare.cli.output import note, show
from kvshare.cli.source import Api, Chosen, Document, Source, TreeOrder
from kvshare.errors import StoreError

if TYPE_CHECKING:
    from kvshare.cli.stopped_store import StoppedStore


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
def stats(origin: Source, namespace: NamespaceDigest = None, tenant: TenantName = None) -> Document:
    """Show how much is stored, in all, per tenant and per namespace."""
    return origin.stats(namespace=namespace, tenant=tenant)


@with_source
def tiers(origin: Source) -> Document:
    """Show what memory and disk hold of KV, and how often plans found it there."""
    return origin.tiers()


@with_source
def tree(
    origin: Source,
    root: Annotated[int | None, argument("tree", "root")] = None,
    depth: Annotated[int, option("tree", "--depth", min=1)] = 4,
    sort: Annotated[TreeOrder, option("tree", "--sort")] = "bytes",
    namespace: NamespaceDigest = None,
    tenant: TenantName = None,
) -> Document:
    """Stored prompts, each below the one that it was edited from, and the KV that they hold."""
    return origin.tree(root=root, depth=depth, sort=sort, namespace=namespace, tenant=tenant)


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
    tenant: TenantName = None,
    everything: Annotated[bool, option("evict", "--all")] = False,
    older_than: Annotated[str | None, option("evict", "--older-than")] = None,
    yes: Annotated[bool, option("evict", "--yes", "-y")] = False,
    dry_run: Annotated[bool, option("evict", "--dry-run", "-n")] = False,
) -> Document | tuple[Document, str]:
    """Evict stored prompts, and free KV that no other prompt uses. More than one needs --yes."""
    which = _chosen(node_id, namespace, tenant, everything)
    if yes and dry_run:
        raise typer.BadParameter("expected either --yes or --dry-run")
    if older_than is not None and node_id is not None:
        raise typer.BadParameter("expected no --older-than with ID")
    only_show = dry_run or (node_id is None and not yes)
    age_s = None if older_than is None else seconds(older_than, "--older-than")
    document = origin.evict(which, older_than_s=age_s, dry_run=only_show)
    if not only_show:
        return document
    return document, "dry run: nothing was evicted" + ("" if dry_run else "; add --yes to do it")


@with_source
def pin(
    origin: Source,
    node_id: Annotated[int | None, argument("pin", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
    tenant: TenantName = None,
) -> Document:
    """Protect prompts from eviction: one, or all that a namespace or tenant has. At most half of the KV."""
    return origin.pin(_chosen(node_id, namespace, tenant))


@with_source
def unpin(
    origin: Source,
    node_id: Annotated[int | None, argument("unpin", "node_id", metavar="[ID]")] = None,
    namespace: NamespaceDigest = None,
    tenant: TenantName = None,
    everything: Annotated[bool, option("unpin", "--all")] = False,
) -> Document:
    """Allow the eviction of pinned prompts again. Nothing is evicted now."""
    return origin.unpin(_chosen(node_id, namespace, tenant, everything))


@with_source
def explain(
    origin: Source,
    prompt: Annotated[str | None, option("explain", "--prompt", "-p")] = None,
    file: Annotated[
        typer.FileText | None, option("explain", "--file", "-f", metavar="<path>", encoding="utf-8")
    ] = None,
    api: Annotated[Api, option("explain", "--api")] = "chat",
    tenant: Annotated[str | None, option("explain", "--tenant")] = None,
    of_key: Annotated[str | None, option("explain", "--of-key")] = None,
) -> Document:
    """Show the plan that a prompt would get: its donors, why others were not used, what is computed."""
    if (prompt is None) == (file is None):
        raise typer.BadParameter("expected exactly one of --prompt and --file")
    one_turn = {"messages": [{"role": "user", "content": prompt}]}
    if file is None and api != "chat":
        raise typer.BadParameter("expected --file with a request of this API", param_hint="--api")
    request = one_turn if file is None else _read_request(file, is_chat=api == "chat")
    return origin.explain(request, api=api, tenant=tenant, key=of_key)


def _chosen(
    node_id: int | None, namespace: str | None, tenant: str | None, everything: bool | None = None
) -> Chosen:
    """Return what the options name; `everything`: --all, if the command has it. Raises a usage error."""
    given = (node_id is not None, namespace is not None, tenant is not None, bool(everything))
    if sum(given) != 1:
        options = ["ID", "--namespace", "--tenant"] + ["--all"] * (everything is not None)
        raise typer.BadParameter(f"expected exactly one of {', '.join(options[:-1])} and {options[-1]}")
    return Chosen(node_id, namespace, tenant, bool(everything))


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

    Raises:  a usage error for both at once or for what is not a URL; StoreError if there is no such store
    """
    if url is not None and store is not None:
        raise typer.BadParameter("expected either --url (a running server) or --store (a stopped one)")
    if store is None:
        url = url or os.environ.get("KVSHARE_URL")
    if url is not None:
        from kvshare.cli.client import AdminClient

        return AdminClient(checked_url(url, "--url"), key=key or os.environ.get("KVSHARE_ADMIN_KEY"))
    return stopped_store(store, config)


def stopped_store(store: Path | None, config: Path | None) -> StoppedStore:
    """The store at --store or in the settings. Raises StoreError if the settings have none."""
    from kvshare.cli.stopped_store import StoppedStore
    from kvshare.settings import load_settings

    path = store or load_settings(config).store.path
    if path is None:
        raise StoreError("store.path is null: the server has its store in memory; ask it with --url")
    return StoppedStore(Path(path), config)
