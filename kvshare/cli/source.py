"""
Where answers come from: a running server, or the metadata of a stopped one. Both answer alike.

`ask(what, arguments)` gives the document of a question, a key of `kvshare.inspection.QUESTIONS`, and
`explain(request)` the plan of a chat request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvshare.errors import StoreError

if TYPE_CHECKING:
    from delta_tree import DeltaTree
    from kvshare.cli.client import AdminClient


def open_source(
    *, url: str | None, key: str | None, store: Path | None, config: Path | None
) -> ServerSource | StoreSource:
    """
    The server at --url or KVSHARE_URL, else the store at --store or in the settings. Opens nothing yet.

    Raises:  a usage error for both at once or for a URL that is none
    """
    if url is not None and store is not None:
        raise typer.BadParameter("expected either --url (a running server) or --store (a stopped one)")
    if store is None:
        url = url or os.environ.get("KVSHARE_URL")
    if url is None:
        return StoreSource(store, config)
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"expected http://host:port, got {url!r}", param_hint="--url")
    from kvshare.cli.client import AdminClient

    return ServerSource(AdminClient(url, key=key or os.environ.get("KVSHARE_ADMIN_KEY")))


class ServerSource:
    """Asks a running server through its admin routes."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    def ask(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if what == "evict":
            return self._client.post("/admin/evict", arguments)
        if what == "node":
            return self._client.get(f"/admin/node/{arguments['id']}")
        return self._client.get(f"/admin/{what}", arguments)

    def explain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        model = request.get("model") or self._served_model()
        return self._client.post("/admin/explain", {**request, "model": model})

    def _served_model(self) -> str:
        models = self._client.get("/v1/models")["data"]
        return str(models[0]["id"])


class StoreSource:
    """Reads the metadata of a stopped server; evicting is the one thing that writes."""

    def __init__(self, folder: Path | None, config: Path | None) -> None:
        self._folder = folder
        self._config = config

    def ask(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        from kvshare.inspection import QUESTIONS

        path = metadata_path(self._where())
        read_only = what != "evict" or bool(arguments["dry_run"])
        drop_file = not read_only and "all" in arguments  # also forgets for which model it was written
        try:
            with opened(path, read_only=read_only) as tree:
                document = QUESTIONS[what](tree, arguments).document
                if drop_file:
                    _delete(path)  # while it is locked
        except UnreadableStoreError as exc:
            if what != "evict" or "all" not in arguments:
                raise
            if drop_file:
                _delete(path)
            document = {"dry_run": read_only, "unreadable": exc.problem}
        return document

    def explain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from kvshare.cli.offline import explain_offline
        from kvshare.settings import load_settings

        document: dict[str, Any] = explain_offline(
            self._where(), load_settings(self._config), request["messages"]
        )
        return document

    def _where(self) -> Path:
        if self._folder is not None:
            return self._folder
        from kvshare.settings import load_settings

        path = load_settings(self._config).store.path
        if path is None:
            raise StoreError("store.path is null: the server has its store in memory; ask it with --url")
        return Path(path)


def metadata_path(folder: Path) -> Path:
    """The metadata file of a store."""
    from kvshare.metadata import METADATA_FILE

    return folder / METADATA_FILE


class UnreadableStoreError(StoreError):
    """
    The store is damaged or of another version. It is only a cache: `kvshare evict --all` may delete it.

    `problem` says what is wrong without saying what to do.
    """

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


@contextmanager
def opened(path: Path, *, read_only: bool) -> Iterator[DeltaTree]:
    """
    The tree in a metadata file that exists, whatever model it was written for.

    Raises:  StoreError, saying what to do, if it is missing or held by a server; UnreadableStoreError
    """
    from delta_tree import (
        DeltaTree,
        DeltaTreeError,
        StoreCorruptError,
        StoreForeignError,
        StoreMismatchError,
        StoreMissingError,
    )

    try:
        if not path.exists():
            raise StoreMissingError(path)  # opening it for writing would leave an empty file
        with DeltaTree.open(path, identity=None, read_only=read_only) as tree:
            yield tree
    except StoreForeignError as exc:
        raise StoreError(f"{path}: this is no KVShare store; set another store path") from exc
    except StoreMismatchError as exc:
        raise UnreadableStoreError(str(exc), f"{path}: written for {exc.found}") from exc
    except StoreCorruptError as exc:
        raise UnreadableStoreError(str(exc), f"{path}: {exc.detail}") from exc
    except DeltaTreeError as exc:
        raise StoreError(str(exc)) from exc


def _delete(path: Path) -> None:
    """Also what a server moved aside: it holds prompts as well."""
    for name in (path.name, f"{path.name}.old"):
        for suffix in ("", "-journal", "-wal", "-shm"):
            path.with_name(name + suffix).unlink(missing_ok=True)
