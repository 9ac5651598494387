"""The metadata of a stopped server: what it answers administrators, and what they may change in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvshare.admin import (
    DiffDocument,
    DiffQuestion,
    Evict,
    NodeDocument,
    NodeQuestion,
    PinDocument,
    StatsQuestion,
    StoreQuestion,
    StoreStats,
    TreeDocument,
    TreeQuestion,
    Unpin,
    checked,
)
from kvshare.cli.source import Api, Document, TreeOrder
from kvshare.errors import StoreError
from kvshare.metadata import METADATA_FILE, UnreadableStoreError, opened

_T = TypeVar("_T")


class StoppedStore:
    """A `Source`. Only evicting and unpinning write; only explaining reads the config."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        self._folder, self._config = folder, config
        self._file = folder / METADATA_FILE

    def stats(self, *, namespace: str | None) -> StoreStats:
        return self._ask(checked(StatsQuestion, {"namespace": namespace}))

    def tree(self, *, root: int | None, namespace: str | None, depth: int, sort: TreeOrder) -> TreeDocument:
        arguments = {"root": root, "namespace": namespace, "depth": depth, "sort": sort}
        return self._ask(checked(TreeQuestion, arguments))

    def node(self, node_id: int) -> NodeDocument:
        return self._ask(checked(NodeQuestion, {"id": node_id}))

    def diff(self, a: int, b: int, *, min_run: int) -> DiffDocument:
        return self._ask(checked(DiffQuestion, {"a": a, "b": b, "min_run": min_run}))

    def evict(self, *, node: int | None, namespace: str | None, everything: bool, dry_run: bool) -> Document:
        arguments = {"node": node, "namespace": namespace, "all": everything, "dry_run": dry_run}
        command = checked(Evict, arguments)
        drops_file = everything and not dry_run  # also forgets for which model it was written
        try:
            with opened(self._file, read_only=dry_run) as tree:
                document = command.apply(tree).document
                if drops_file:
                    self._delete()  # while it is locked
        except UnreadableStoreError as exc:
            if not everything:
                raise
            if drops_file:
                self._delete()
            return {"dry_run": dry_run, "unreadable": exc.problem}
        return document

    def pin(self, *, node: int | None, namespace: str | None) -> Document:
        raise StoreError("how much may be pinned is known to a running server only: ask it with --url")

    def unpin(self, *, node: int | None, namespace: str | None, everything: bool) -> PinDocument:
        command = checked(Unpin, {"node": node, "namespace": namespace, "all": everything})
        with opened(self._file, read_only=False) as tree:
            return command.apply(tree).document

    def explain(self, request: Mapping[str, Any], *, api: Api) -> dict[str, Any]:
        if api != "chat":
            raise StoreError("other requests than chats are explained by a running server: use --url")
        from kvshare.cli.explain_offline import explain_offline
        from kvshare.settings import load_settings

        return explain_offline(self._folder, load_settings(self._config), request["messages"])

    def _ask(self, question: StoreQuestion[_T]) -> _T:
        with opened(self._file, read_only=True) as tree:
            return question.answer(tree)

    def _delete(self) -> None:
        """Also what a server moved aside: it holds prompts as well."""
        for name in (self._file.name, f"{self._file.name}.old"):
            for suffix in ("", "-journal", "-wal", "-shm"):
                self._file.with_name(name + suffix).unlink(missing_ok=True)
