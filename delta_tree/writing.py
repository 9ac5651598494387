"""
Writes each change of a tree to disk, then applies it in memory; if it cannot be written, it is not applied.

Uses and lazy evictions are applied at once and written with the next change, so that they cost no transaction
of their own. The caller holds the tree's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from delta_tree.errors import MetadataStoreError, StoreNotEmptyError
from delta_tree.forest import Forest
from delta_tree.node import Change, Node, NodeId
from delta_tree.storage import Storage

log = logging.getLogger(__name__)

_MAX_UNWRITTEN_USES = 256


def opened_empty(path: Path, identity: str) -> Storage:
    """Open a file for a tree that is in memory only. Raises MetadataStoreError, also if it has nodes."""
    storage = Storage.open(path, identity=identity, read_only=False)
    try:
        if storage.has_nodes:
            raise StoreNotEmptyError(path)
    except BaseException:
        storage.close()
        raise
    return storage


class ChangeWriter:
    """Writes and applies changes. With `storage` None, for a tree in memory, it only applies them."""

    def __init__(self, storage: Storage | None, forest: Forest) -> None:
        self._storage = storage
        self._forest = forest
        self._used: set[NodeId] = set()  # nodes whose use counters are not on disk yet
        self._unwritten: list[Change] = []  # lazy evictions that are not on disk yet
        self._loses_uses = False

    @property
    def identity(self) -> str | None:
        """Return the identity of the file; None for a tree in memory."""
        return None if self._storage is None else self._storage.identity

    def attach(self, storage: Storage) -> None:
        """Write the tree to an empty file, and each later change, too. `storage` is closed on an error."""
        try:
            storage.replace(self._forest.content())
        except BaseException:
            storage.close()
            raise
        if self._storage is not None:
            self._storage.close()
        self._storage = storage
        self._unwritten.clear()
        self._used.clear()

    def store(self, change: Change, *, lazily: bool = False) -> None:
        """Write a change and all unwritten ones, then apply it; `lazily`: write it with the next change."""
        if lazily and self._storage is not None and self._storage.is_writable:
            self._unwritten.append(change)
        else:
            if self._storage is not None:
                self._write(self._storage, [*self._unwritten, change])
            self._unwritten.clear()
            self._used.clear()
        self._forest.apply(change)

    def note_use(self, used: Node) -> None:
        """Apply new use counters. They are written with the next change, or when many are unwritten."""
        self._forest.apply(Change(put_nodes=(used,)))
        self._used.add(used.node_id)
        if len(self._used) >= _MAX_UNWRITTEN_USES:
            self._write_pending()

    def close(self) -> None:
        """Write what is due, and release the file."""
        self._write_pending()
        if self._storage is not None:
            self._storage.close()

    def _write_pending(self) -> None:
        """Write use counters and lazy evictions. An error is logged only: it must not fail a request."""
        if self._storage is not None and self._storage.is_writable and (self._used or self._unwritten):
            try:
                self._write(self._storage, self._unwritten)
                self._unwritten.clear()
            except MetadataStoreError as exc:
                if not self._loses_uses:
                    log.warning(
                        "use counters are not stored: %s. Look at the space and permissions there; until "
                        "then a restart loses the order of eviction",
                        exc,
                    )
                self._loses_uses = True
        self._used.clear()

    def _write(self, storage: Storage, changes: Sequence[Change]) -> None:
        """Write changes with the due use counters. Raises MetadataStoreError."""
        storage.write(changes, self._due_uses())
        if self._loses_uses:
            log.warning("use counters are stored again")
            self._loses_uses = False

    def _due_uses(self) -> list[Node]:
        return [self._forest.nodes[i] for i in self._used if i in self._forest.nodes]
