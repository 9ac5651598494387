"""
Opens the metadata store of a server. The store is a cache, so a bad one does not prevent the start.

    damaged, or of another model or version    moved aside, replacing an earlier one; a new one is created
    not writable, or of another program        left unchanged; the tree is in memory until it can be written
    open in another process                    StoreError: the operator must correct that

Each case is one warning. Commands on a stopped store use `opened`, which raises instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    MetadataStoreError,
    NodeId,
    Segment,
    SegmentId,
    StoreCorruptError,
    StoreForeignError,
    StoreLockedError,
    StoreMismatchError,
    StoreMissingError,
    StoreNotEmptyError,
    StoreUnavailableError,
    aside_path,
    check_unlocked,
    set_aside,
)
from kvshare.errors import StoreError

log = logging.getLogger(__name__)

METADATA_FILE = "tree.sqlite3"


class UnreadableStoreError(StoreError):
    """
    The store is damaged or of another version. As it is a cache, `kvshare evict --all` may delete it.

    `problem`: what is wrong, without advice.
    """

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


@contextmanager
def opened(path: Path, *, read_only: bool) -> Iterator[DeltaTree]:
    """
    The tree in an existing metadata file, of any model.

    Raises:  StoreError, with the way out, if it is missing or open in a server; UnreadableStoreError
    """
    try:
        if not path.exists():
            raise StoreMissingError(path)  # opening it for writing would leave an empty file
        with DeltaTree.open(path, identity=None, read_only=read_only) as tree:
            yield tree
    except StoreForeignError as exc:
        raise StoreError(f"{path}: this is not a KVShare store; set another store path") from exc
    except (StoreCorruptError, StoreMismatchError) as exc:
        raise UnreadableStoreError(str(exc), f"{path} {problem_of(exc)}") from exc
    except DeltaTreeError as exc:
        raise StoreError(str(exc)) from exc


def check_not_in_use(folder: str | None) -> None:
    """
    Called before a model is loaded, so that the error comes early.

    Raises:  StoreError, with the ways out, if another process has the store open
    """
    if folder is None:
        return
    try:
        check_unlocked(Path(folder) / METADATA_FILE)
    except StoreLockedError as exc:
        raise StoreError(str(exc)) from exc


def open_tree(folder: str | None, *, identity: str, loss: str) -> DeltaTree:
    """
    Return the tree in a folder's store; in memory if `folder` is None.

    `loss`: a sentence for the log that says what is lost if the stored prompts cannot be used.
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
            move_aside(path, exc, loss=loss)
            return DeltaTree.open(path, identity=identity)
    except StoreLockedError as exc:
        raise StoreError(str(exc)) from exc
    except MetadataStoreError as exc:
        return _in_memory(path, exc, identity)


_REMEDY = "Delete that file, or move it back and give this server another store.path"


def move_aside(path: Path, exc: MetadataStoreError, *, loss: str, remedy: str = _REMEDY) -> None:
    """Keep a store that cannot be used next to the new one, with a warning. Raises MetadataStoreError."""
    is_second = aside_path(path).exists()
    moved = set_aside(path)
    log.warning(
        "the store %s %s: it was moved to %s%s, and a new one was begun. %s. %s",
        path,
        problem_of(exc),
        moved.name,
        ", over an earlier one" if is_second else "",
        loss,
        remedy,
    )


def open_emptied_tree(folder: str | None, *, identity: str) -> tuple[DeltaTree, list[tuple[str, int]]]:
    """
    For an engine whose KV is lost with its process: an empty tree, and the prompts that were in it.

    Raises:  StoreError if another process has the store open
    """
    tree = open_tree(folder, identity=identity, loss="Nothing is lost: KV does not survive a restart")
    forgotten = [(node.namespace, int(node.node_id)) for node in tree.nodes()]
    try:
        tree.discard_missing(frozenset())
    except MetadataStoreError as exc:
        tree.close()
        tree = _in_memory(exc.path, exc, identity)
    return tree, forgotten


def open_stored_tree(
    folder: str,
    *,
    identity: str,
    whole: Callable[[Iterable[Segment]], Container[SegmentId]],
    min_tokens: int,
) -> tuple[DeltaTree, list[tuple[str, int]]]:
    """
    For an engine whose KV outlives the process: the prompts of which all KV is there, and those that left.

    `whole`: those of the tree's segments whose KV is there; called once the tree is locked. A prompt that
    lost its end is shortened to what is whole, if that has `min_tokens`. A tree in memory, whose `identity`
    is None, is empty.
    Raises:  StoreError if another process has the store open
    """
    tree = open_tree(folder, identity=identity, loss="What was stored on disk is deleted with it")
    before = [(node.namespace, int(node.node_id)) for node in tree.nodes()]
    alive = whole(tree.segments())
    try:
        _shorten(tree, alive, min_tokens)
        tree.discard_missing(alive, lazily=True)  # a disk may be too full to write that, and have all else
    except MetadataStoreError as exc:
        tree.close()
        tree = _in_memory(exc.path, exc, identity)
    return tree, [each for each in before if tree.get(NodeId(each[1])) is None]


def _shorten(tree: DeltaTree, alive: Container[SegmentId], min_tokens: int) -> None:
    for node in tree.nodes():
        lost = (start for start, segment_id, _, _ in node.pieces.rows() if segment_id not in alive)
        num_left = next(lost, node.num_tokens)
        is_long = min_tokens <= num_left < node.num_tokens
        if is_long and not node.pinned and tree.find(node.namespace, node.token_ids[:num_left]) is None:
            tree.shorten(node.node_id, num_left, lazily=True)


def problem_of(exc: MetadataStoreError) -> str:
    """Say what is wrong with a store, as the end of a sentence: without advice and digests of models."""
    if isinstance(exc, StoreForeignError):
        return "belongs to another program"
    if isinstance(exc, StoreMismatchError):
        # An identity consists of digests, which mean nothing to an operator.
        found = "another model or dtype" if exc.found.startswith("identity ") else exc.found
        return f"was written for {found}"
    if isinstance(exc, StoreCorruptError):
        return f"is damaged ({exc.detail})"
    if isinstance(exc, StoreNotEmptyError):
        return "has prompts that this server does not serve"
    if isinstance(exc, StoreLockedError):
        return "is open in another process"
    if isinstance(exc, StoreUnavailableError):
        return f"cannot be used ({exc.detail})"
    return f"cannot be used ({type(exc).__name__})"


def _in_memory(path: Path, exc: MetadataStoreError, identity: str) -> DeltaTree:
    log.warning(
        "the store %s %s: the metadata of prompts are in memory, and lost with the process. Check disk space "
        "and permissions, or set another store.path (null: memory, without this warning); it is tried again",
        path,
        problem_of(exc),
    )
    return DeltaTree.open(None, identity=identity)
