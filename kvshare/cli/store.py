"""
`kvshare stats`, `tiers`, `tree`, `node`, `diff`, `explain`, `evict`, `pin`: of a running server, or of the
metadata of a stopped one. Both answer alike: a `Source` is either.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvshare.cli import options
from kvshare.cli.options import OutputFormat
from kvshare.cli.output import note, show
from kvshare.cli.source import Chosen, Source
from kvshare.errors import StoreError

if TYPE_CHECKING:
    from kvshare.cli.stopped_store import StoppedStore


def stats(
    namespace: options.NamespaceDigest = None,
    tenant: options.TenantName = None,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Show how much is stored, in all, per tenant and per namespace."""
    document = source(url, key, store, config).stats(namespace=namespace, tenant=tenant)
    show("stats", document, output_format)


def tiers(
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Show what memory and disk hold of KV, and how often plans found it there."""
    show("tiers", source(url, key, store, config).tiers(), output_format)


def tree(
    root: options.TreeRoot = None,
    depth: options.Depth = 4,
    sort: options.Sort = "bytes",
    namespace: options.NamespaceDigest = None,
    tenant: options.TenantName = None,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Stored prompts, each below the one that it was edited from, and the KV that they hold."""
    origin = source(url, key, store, config)
    document = origin.tree(root=root, depth=depth, sort=sort, namespace=namespace, tenant=tenant)
    show("tree", document, output_format)


def node(
    node_id: options.NodeId,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """One stored prompt. Its parents, edits, pieces of KV and the prompts that share it; never its text."""
    show("node", source(url, key, store, config).node(node_id), output_format)


def diff(
    a: options.DiffFrom,
    b: options.DiffTo,
    min_run: options.MinRun = 1,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """The edits between two stored prompts, as spans and counts."""
    show("diff", source(url, key, store, config).diff(a, b, min_run=min_run), output_format)


def evict(
    node_id: options.EvictId = None,
    namespace: options.NamespaceDigest = None,
    tenant: options.TenantName = None,
    everything: options.EvictAll = False,
    older_than: options.OlderThan = None,
    yes: options.Yes = False,
    dry_run: options.EvictDryRun = False,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Evict stored prompts, and free KV that no other prompt uses. More than one needs --yes."""
    origin, which = source(url, key, store, config), _chosen(node_id, namespace, tenant, everything)
    if yes and dry_run:
        raise typer.BadParameter("expected either --yes or --dry-run")
    if older_than is not None and node_id is not None:
        raise typer.BadParameter("expected no --older-than with ID")
    only_show = dry_run or (node_id is None and not yes)
    age_s = None if older_than is None else options.seconds(older_than, "--older-than")
    show("evict", origin.evict(which, older_than_s=age_s, dry_run=only_show), output_format)
    if only_show:
        note("dry run: nothing was evicted" + ("" if dry_run else "; add --yes to do it"))


def pin(
    node_id: options.PinId = None,
    namespace: options.NamespaceDigest = None,
    tenant: options.TenantName = None,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Protect prompts from eviction: one, or all that a namespace or tenant has. At most half of the KV."""
    origin, which = source(url, key, store, config), _chosen(node_id, namespace, tenant)
    show("pin", origin.pin(which), output_format)


def unpin(
    node_id: options.UnpinId = None,
    namespace: options.NamespaceDigest = None,
    tenant: options.TenantName = None,
    everything: options.UnpinAll = False,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Allow the eviction of pinned prompts again. Nothing is evicted now."""
    origin, which = source(url, key, store, config), _chosen(node_id, namespace, tenant, everything)
    show("unpin", origin.unpin(which), output_format)


def explain(
    prompt: options.Prompt = None,
    file: options.RequestFile = None,
    api: options.RequestApi = "chat",
    tenant: options.PlanTenant = None,
    of_key: options.PlanKey = None,
    url: options.Url = None,
    key: options.Key = None,
    store: options.Store = None,
    config: options.Config = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Show the plan that a prompt would get: its donors, why others were not used, what is computed."""
    origin = source(url, key, store, config)
    if (prompt is None) == (file is None):
        raise typer.BadParameter("expected exactly one of --prompt and --file")
    one_turn = {"messages": [{"role": "user", "content": prompt}]}
    if file is None and api != "chat":
        raise typer.BadParameter("expected --file with a request of this API", param_hint="--api")
    request = one_turn if file is None else _read_request(file, is_chat=api == "chat")
    show("explain", origin.explain(request, api=api, tenant=tenant, key=of_key), output_format)


def _chosen(
    node_id: int | None, namespace: str | None, tenant: str | None, everything: bool | None = None
) -> Chosen:
    """Return what the options name; `everything`: --all, if the command has it. Raises a usage error."""
    given = (node_id is not None, namespace is not None, tenant is not None, bool(everything))
    if sum(given) != 1:
        *most, last = ["ID", "--namespace", "--tenant"] + ["--all"] * (everything is not None)
        raise typer.BadParameter(f"expected exactly one of {', '.join(most)} and {last}")
    return Chosen(node_id, namespace, tenant, bool(everything))


def _read_request(file: typer.FileText, *, is_chat: bool) -> dict[str, Any]:
    """Return a request from a file that holds the request or, of a chat, only its messages."""
    try:
        document = json.load(file)
    except (OSError, ValueError) as exc:
        raise typer.BadParameter(f"{file.name} cannot be read as JSON: {exc}", param_hint="--file") from exc
    request = {"messages": document} if isinstance(document, list) else document
    if not isinstance(request, dict) or (is_chat and not isinstance(request.get("messages"), list)):
        expected = 'a list of messages or an object with "messages"' if is_chat else "an object"
        raise typer.BadParameter(f"{file.name}: expected {expected}", param_hint="--file")
    return request


def source(url: str | None, key: str | None, store: Path | None, config: Path | None) -> Source:
    """
    Return the server at --url or KVSHARE_URL, else the store at --store or in the settings. Opens nothing
    yet.

    Raises:  a usage error for both at once or for what is not a URL; StoreError if there is no such store
    """
    if url is not None and store is not None:
        raise typer.BadParameter("expected either --url (a running server) or --store (a stopped one)")
    if store is None:
        url = url or os.environ.get("KVSHARE_URL")
    if url is not None:
        from kvshare.cli.client import AdminClient

        return AdminClient(options.checked_url(url, "--url"), key=key or os.environ.get("KVSHARE_ADMIN_KEY"))
    return stopped_store(store, config)


def stopped_store(store: Path | None, config: Path | None) -> StoppedStore:
    """Return the store at --store or in the settings. Raises StoreError if the settings have none."""
    from kvshare.cli.stopped_store import StoppedStore
    from kvshare.settings import load_settings

    path = store or load_settings(config).store.path
    if path is None:
        raise StoreError("store.path is null: the server has its store in memory; ask it with --url")
    return StoppedStore(Path(path), config)
