"""
The metadata store of a server, opened without keeping the server from starting: it is only a cache.

    damaged, or of another model or version   moved aside, one generation; a new one is begun
    not to be written, or another program's   left alone; the tree is in memory until the next start
    open in another process                   StoreError: a mistake that only its maker can correct

What happened is one warning. Commands that look into a stopped store get it from `opened`, which refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    StoreCorruptError,
    StoreForeignError,
    StoreLockedError,
    StoreMismatchError,
    StoreMissingError,
    StoreUnavailableError,
    check_unlocked,
    set_aside,
)
from delta_tree import StoreError as TreeStoreError
from kvshare.errors import StoreError

log = logging.getLogger(__name__)

METADATA_FILE = "tree.sqlite3"


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
    try:
        if not path.exists():
            raise StoreMissingError(path)  # opening it for writing would leave an empty file
        with DeltaTree.open(path, identity=None, read_only=read_only) as tree:
            yield tree
    except StoreForeignError as exc:
        raise StoreError(f"{path}: this is no KVShare store; set another store path") from exc
    except (StoreCorruptError, StoreMismatchError) as exc:
        raise UnreadableStoreError(str(exc), f"{path} {_problem_of(exc)}") from exc
    except DeltaTreeError as exc:
        raise StoreError(str(exc)) from exc


def check_not_in_use(folder: str | None) -> None:
    """
    To be asked before anything heavy is loaded.

    Raises:  StoreError if another process has the store open, with the ways out
    """
    if folder is None:
        return
    try:
        check_unlocked(Path(folder) / METADATA_FILE)
    except StoreLockedError as exc:
        raise StoreError(str(exc)) from exc


def open_tree(folder: str | None, *, identity: str, loss: str) -> DeltaTree:
    """
    The tree in a folder's store; None keeps it in memory.

    `loss` says for the log what it costs that the stored prompts cannot be used.
    Raises:  StoreError if another process has the store open
    """
    if folder is None:
        return DeltaTree.open(None, identity=identity)
    path = Path(folder) / METADATA_FILE
    try:
        try:
            return DeltaTree.open(path, identity=identity)
        except StoreForeignError:
            raise
        except (StoreCorruptError, StoreMismatchError) as exc:
            moved = set_aside(path)
            log.warning(
                "the store %s %s: it is %s now, in the place of an earlier one, and a new one was begun. %s. "
                "Delete that file, or move it back and give this server another store.path",
                path,
                _problem_of(exc),
                moved.name,
                loss,
            )
            return DeltaTree.open(path, identity=identity)
    except StoreLockedError as exc:
        raise StoreError(str(exc)) from exc
    except TreeStoreError as exc:
        return _in_memory(path, exc, identity)


def open_emptied_tree(folder: str | None, *, identity: str) -> tuple[DeltaTree, list[tuple[str, int]]]:
    """
    The same for an engine whose KV dies with its process: an empty tree, and what was in it.

    Raises:  StoreError if another process has the store open
    """
    tree = open_tree(folder, identity=identity, loss="Nothing is lost: KV is not kept over a restart")
    forgotten = [(node.namespace, int(node.node_id)) for node in tree.nodes()]
    try:
        tree.discard_missing(frozenset())
    except TreeStoreError as exc:
        tree.close()
        tree = _in_memory(exc.path, exc, identity)
    return tree, forgotten


def _problem_of(exc: TreeStoreError) -> str:
    """What is wrong with a store, to follow its name: without advice, and without a model's digests."""
    if isinstance(exc, StoreForeignError):
        return "belongs to another program"
    if isinstance(exc, StoreMismatchError):
        # An identity is a row of digests, which tell nobody anything.
        found = "another model or dtype" if exc.found.startswith("identity ") else exc.found
        return f"was written for {found}"
    if isinstance(exc, StoreCorruptError):
        return f"is damaged ({exc.detail})"
    if isinstance(exc, StoreUnavailableError):
        return f"cannot be used ({exc.detail})"
    return f"cannot be used ({type(exc).__name__})"


def _in_memory(path: Path, exc: TreeStoreError, identity: str) -> DeltaTree:
    log.warning(
        "the store %s %s: what is known of prompts is in memory until the next start, and is lost then. "
        "Check disk space and permissions, or set another store.path (null: memory, without this warning)",
        path,
        _problem_of(exc),
    )
    return DeltaTree.open(None, identity=identity)
