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
    TierDocument,
    TreeDocument,
    TreeQuestion,
    Unpin,
    checked,
)
from kvshare.cli.source import Api, Chosen, Document, TreeOrder
from kvshare.errors import StoreError
from kvshare.metadata import METADATA_FILE, UnreadableStoreError, opened
from kvshare.tenants import Tenants
from kvshare.tiers.inspection import CollectedFiles, StoredFiles, VerifiedStore

_T = TypeVar("_T")


class StoppedStore:
    """A `Source`. Only evicting and unpinning write; only explaining reads the config."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        self._folder, self._config = folder, config
        self._file = folder / METADATA_FILE

    def stats(self, *, namespace: str | None, tenant: str | None) -> StoreStats:
        return self._ask(checked(StatsQuestion, {"namespace": namespace, "tenant": tenant}))

    def tiers(self) -> Document:
        """Return what is on disk, also of a vLLM. What a server counts is not known without one."""
        of_vllm = StoredFiles.of_vllm(self._folder)
        places = [("disk of vLLM", each) for each in of_vllm]
        if not of_vllm or self._file.exists():
            with opened(self._file, read_only=True):
                places.insert(0, ("disk", StoredFiles(self._folder)))
        rows = []
        for name, stored in places:
            sizes = stored.sizes()
            on_disk = {"num_segments": len(sizes), "num_bytes": sum(sizes.values())}
            rows.append({**dict.fromkeys(TierDocument.__annotations__), "name": name, **on_disk})
        return {"tiers": rows}

    def verify(self) -> VerifiedStore:
        """Reads all KV on disk; a server may run meanwhile."""
        of_vllm = (each.verified() for each in StoredFiles.of_vllm(self._folder))
        return sum(of_vllm, StoredFiles(self._folder).verified())

    def collect(self, *, dry_run: bool) -> CollectedFiles:
        """Deletes KV on disk that belongs to no prompt."""
        with opened(self._file, read_only=dry_run) as tree:
            segments = {segment.segment_id for segment in tree.segments()}
            return StoredFiles(self._folder).collect(segments, dry_run=dry_run)

    def tree(
        self, *, root: int | None, namespace: str | None, tenant: str | None, depth: int, sort: TreeOrder
    ) -> TreeDocument:
        arguments = {"root": root, "namespace": namespace, "tenant": tenant, "depth": depth, "sort": sort}
        return self._ask(checked(TreeQuestion, arguments))

    def node(self, node_id: int) -> NodeDocument:
        return self._ask(checked(NodeQuestion, {"id": node_id}))

    def diff(self, a: int, b: int, *, min_run: int) -> DiffDocument:
        return self._ask(checked(DiffQuestion, {"a": a, "b": b, "min_run": min_run}))

    def evict(self, which: Chosen, *, older_than_s: int | None, dry_run: bool) -> Document:
        command = checked(Evict, {**which.arguments, "older_than_s": older_than_s, "dry_run": dry_run})
        everything = which.everything and older_than_s is None
        drops_file = everything and not dry_run  # also forgets for which model it was written
        try:
            with opened(self._file, read_only=dry_run) as tree:
                result = command.apply(tree, self._tenants())
                if not dry_run:  # while it is locked
                    StoredFiles(self._folder).drop(result.freed_segments)
                if drops_file:
                    self._delete()
        except UnreadableStoreError as exc:
            if not everything:
                raise
            if drops_file:
                self._delete()
            return {"dry_run": dry_run, "unreadable": exc.problem}
        return result.document

    def pin(self, which: Chosen) -> Document:
        raise StoreError("only a running server knows how much may be pinned: ask it with --url")

    def unpin(self, which: Chosen) -> PinDocument:
        command = checked(Unpin, which.arguments)
        with opened(self._file, read_only=False) as tree:
            return command.apply(tree, self._tenants()).document

    def explain(
        self, request: Mapping[str, Any], *, api: Api, tenant: str | None, key: str | None
    ) -> dict[str, Any]:
        if tenant is not None or key is not None:
            raise StoreError("plans for another tenant are made by a running server: use --url")
        if api != "chat":
            raise StoreError("other requests than chats are explained by a running server: use --url")
        from kvshare.cli.explain_offline import explain_offline
        from kvshare.settings import load_settings

        return explain_offline(self._folder, load_settings(self._config), request["messages"])

    def _ask(self, question: StoreQuestion[_T]) -> _T:
        with opened(self._file, read_only=True) as tree:
            return question.answer(tree, self._tenants())

    def _tenants(self) -> Tenants:
        tenants = Tenants()
        tenants.load(self._folder)
        return tenants

    def _delete(self) -> None:
        """Also what a server moved aside: it holds prompts as well. And all KV on disk."""
        StoredFiles(self._folder).collect((), dry_run=False)
        for name in (self._file.name, f"{self._file.name}.old"):
            for suffix in ("", "-journal", "-wal", "-shm"):
                self._file.with_name(name + suffix).unlink(missing_ok=True)
