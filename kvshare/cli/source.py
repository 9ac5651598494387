"""
Where answers come from: a running server, or the metadata of a stopped one. Both answer alike.

`ask(what, arguments)` gives the document of a question: a key of `kvshare.inspection.QUESTIONS`, or "explain"
with a request. An argument of None is as good as not given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvshare.cli.options import Config, Format, Key, OutputFormat, Store, Url
from kvshare.cli.output import show
from kvshare.errors import StoreError

if TYPE_CHECKING:
    from kvshare.cli.client import AdminClient

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
        source = open_source(url=url, key=key, store=store, config=config)
        command(lambda what, arguments: show(what, source.ask(what, arguments), output_format), **own)

    shared = signature(with_source, eval_str=True)
    own = signature(command, eval_str=True).parameters.values()
    options = [*list(own)[1:], *(each for each in shared.parameters.values() if each.name != "own")]
    with_source.__signature__ = shared.replace(parameters=options)  # type: ignore[attr-defined]  # has one
    with_source.__doc__ = command.__doc__
    return with_source


def open_source(
    *, url: str | None, key: str | None, store: Path | None, config: Path | None
) -> AdminClient | StoreSource:
    """
    The server at --url or KVSHARE_URL, else the store at --store or in the settings. Opens nothing yet.

    Raises:  a usage error for both at once or for a URL that is none; StoreError if there is no such store
    """
    if url is not None and store is not None:
        raise typer.BadParameter("expected either --url (a running server) or --store (a stopped one)")
    if store is None:
        url = url or os.environ.get("KVSHARE_URL")
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"expected http://host:port, got {url!r}", param_hint="--url")
        from kvshare.cli.client import AdminClient

        return AdminClient(url, key=key or os.environ.get("KVSHARE_ADMIN_KEY"))
    from kvshare.settings import load_settings

    path = store or load_settings(config).store.path
    if path is None:
        raise StoreError("store.path is null: the server has its store in memory; ask it with --url")
    return StoreSource(Path(path), config)


@dataclass(frozen=True, slots=True)
class StoreSource:
    """Reads the metadata of a stopped server; evicting and unpinning write."""

    folder: Path
    config: Path | None  # of the server; only explaining needs what it says

    def ask(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if what == "explain":
            if "api" in arguments:
                raise StoreError("other requests than chats are explained by a running server: use --url")
            from kvshare.cli.offline import explain_offline
            from kvshare.settings import load_settings

            return explain_offline(self.folder, load_settings(self.config), arguments["messages"])
        if what == "pin":
            raise StoreError("how much may be pinned is known to a running server only: ask it with --url")
        from kvshare.inspection import QUESTIONS
        from kvshare.metadata import METADATA_FILE, UnreadableStoreError, opened

        path = self.folder / METADATA_FILE
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
