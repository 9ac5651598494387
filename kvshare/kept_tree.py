"""
Keeps the tree of a running server in its file: a server needs no restart because a folder could not be
written for a while, or its files were deleted.

    the file could not be used at the start     the tree moves from memory into it once it can be written
    it was deleted or replaced by another one   the tree is written into a new one

A tree that moves begins a new file: one with prompts, of an earlier run or a backup, is moved aside.
"""

from __future__ import annotations

import logging
from pathlib import Path

from delta_tree import (
    DeltaTree,
    MetadataStoreError,
    StoreCorruptError,
    StoreForeignError,
    StoreMismatchError,
    StoreNotEmptyError,
)
from kvshare.metadata import METADATA_FILE, move_aside, problem_of
from kvshare.part_problems import PartProblem
from kvshare.parts import PartReading, ServedPart

log = logging.getLogger(__name__)

_KEPT_ASIDE = "It is written from what is stored now; KV that the other has on disk stays while there is room"
_REMEDY = "Delete that file, or stop this server, move it back and start again"

_Place = tuple[int, int] | None  # file system and number of a file; None: there is none


class KeptTree:
    """`look` blocks, and runs in the writer's thread: first at the start, then every few seconds."""

    def __init__(self, tree: DeltaTree, folder: str | None, *, identity: str) -> None:
        """`folder`: of the store; None: the tree stays in memory. `identity`: of the store."""
        self._tree = tree
        self._path = None if folder is None else Path(folder) / METADATA_FILE
        self._identity = identity
        self._place = self._found()
        self.problem: str | None = None  # why the tree is in memory, although there is a folder

    def look(self) -> bool:
        """Move the tree into its file, if it can be and is not there; whether it did. Never raises."""
        if self._path is None or (self._tree.identity is not None and self._found() == self._place):
            self._end_problem()
            return False
        is_lost = self._tree.identity is not None
        try:
            self._attach(self._path)
        except MetadataStoreError as exc:
            if is_lost and self.problem is None:
                log.warning(
                    "the store %s is gone, and cannot be written again: it %s. What is stored now is lost "
                    "with the process; it is tried again",
                    self._path,
                    problem_of(exc),
                )
            self.problem = problem_of(exc)
            return False
        if is_lost and self.problem is None:
            log.warning("the store %s was gone: it was written again, nothing is lost", self._path)
        else:
            log.warning("the store %s is written again: nothing is lost with the process now", self._path)
        self._place, self.problem = self._found(), None
        return True

    def reading(self, unstored: str | None) -> PartReading:
        """`unstored`: why no prompt can be stored at all."""
        if unstored is not None:
            return PartReading(ServedPart.STORE, PartProblem.STORE_NOT_WRITTEN, unstored)
        if self.problem is not None:
            return PartReading(ServedPart.STORE, PartProblem.STORE_IN_MEMORY, self.problem)
        return PartReading(ServedPart.STORE)

    def _end_problem(self) -> None:
        if self.problem is not None:
            log.warning("the store %s is there again: nothing is lost", self._path)
            self.problem = None

    def _attach(self, path: Path) -> None:
        try:
            self._tree.attach(path, identity=self._identity)
        except StoreForeignError:
            raise
        except (StoreCorruptError, StoreMismatchError) as exc:
            move_aside(path, exc, loss="It is written again from what is stored now")
            self._tree.attach(path, identity=self._identity)
        except StoreNotEmptyError as exc:
            move_aside(path, exc, loss=_KEPT_ASIDE, remedy=_REMEDY)
            self._tree.attach(path, identity=self._identity)

    def _found(self) -> _Place:
        try:
            status = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if status is None else (status.st_dev, status.st_ino)
