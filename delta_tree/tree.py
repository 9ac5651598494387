"""
The delta tree: what prompts are stored, how they descend from one another, what they share.

One lock guards every change. A change is worked out, stored, then made in memory: if it cannot be
stored, nothing has happened. KV bytes live elsewhere; each answer says which segments to drop.
"""

import logging
import time
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from delta_tree.align import align
from delta_tree.answers import Eviction, Insertion
from delta_tree.checks import check_forest, check_node
from delta_tree.drafts import check_new_segments, divide, parent_of, quality, segment_lookup
from delta_tree.errors import (
    InvalidNodeError,
    InvalidTokensError,
    PinnedNodeError,
    StoreCorruptError,
    StoreError,
)
from delta_tree.forest import Change, Forest, recompose
from delta_tree.node import Node, NodeDraft, NodeId, NodeIds, Segment, SegmentId
from delta_tree.reading import TreeReader
from delta_tree.script import EditScript
from delta_tree.spans import TokenIds, token_ids
from delta_tree.storage import Storage

log = logging.getLogger(__name__)

_SCRIPT_MIN_RUN = 16  # a script tells how prompts descend; one-token matches would tell nothing
_MAX_UNWRITTEN_USES = 256


class DeltaTree(TreeReader):
    """Lives as long as the server. Use `open`; `close` is idempotent."""

    def __init__(
        self,
        storage: Storage | None,
        forest: Forest,
        *,
        clock: Callable[[], float],
        new_id: Callable[[], NodeId] | None = None,
    ) -> None:
        super().__init__(forest)
        self._storage = storage
        self._clock = clock
        self._new_id = new_id or NodeIds()
        self._used: set[NodeId] = set()  # nodes whose use counters are not on disk yet

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        identity: str | None,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], NodeId] | None = None,
    ) -> Self:
        """
        The tree stored at `path`, a file made if it is missing; None keeps it in memory only.

        `clock` and `new_id` are for replays that must come out the same twice.

        Raises:  StoreError: missing (read-only), corrupt, of another identity or version, locked
        """
        forest = Forest()
        if path is None:
            return cls(None, forest, clock=clock, new_id=new_id)
        storage = Storage.open(path, identity=identity, read_only=read_only)
        try:
            segments, nodes = storage.load()
            forest.restore(segments, nodes)
            check_forest(forest)
        except InvalidNodeError as exc:
            storage.close()
            raise StoreCorruptError(path, str(exc)) from exc
        except BaseException:
            storage.close()
            raise
        return cls(storage, forest, clock=clock, new_id=new_id)

    @property
    def identity(self) -> str | None:
        """What the stored KV depends on, as the file says; None in memory."""
        return None if self._storage is None else self._storage.identity

    def close(self) -> None:
        """Write the use counters that are still due, and release the file."""
        with self._lock:
            if self._storage is not None and not self._storage.closed:
                self._write_uses()
                self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def insert(self, draft: NodeDraft) -> Insertion:
        """
        Make a prompt a node. A prompt the namespace has already is touched, and takes the draft's
        pieces if they are better: a longer exact prefix, or else lower generations.

        Raises:  InvalidNodeError if the draft is not a whole prompt over known segments of its
                 own namespace; StoreError if it cannot be stored. Nothing is changed then
        """
        try:
            tokens = token_ids(draft.token_ids)
        except InvalidTokensError as exc:
            raise InvalidNodeError(str(exc)) from exc
        known = self._forest.find(draft.namespace, tokens)
        parent = parent_of(self._forest, draft)
        # Aligned before the lock is taken: it may take long, and tokens never change.
        script = None
        if parent is not None and known is None:
            script = align(parent.token_ids, tokens, min_run=_SCRIPT_MIN_RUN)
        with self._lock:
            known = self._forest.find(draft.namespace, tokens)
            parent = parent_of(self._forest, draft)
            check_new_segments(self._forest, draft)
            if known is not None:
                return self._insert_again(known, draft)
            if parent is not None and script is None:  # the known node left in between
                script = align(parent.token_ids, tokens, min_run=_SCRIPT_MIN_RUN)
            return self._insert_first(draft, tokens, script)

    def touch(self, node_id: NodeId) -> None:
        """
        Count a use of a node. One that is gone is ignored: it may have been evicted meanwhile.

        Written to disk with the next change, so that a hit costs no transaction.
        """
        with self._lock:
            node = self._forest.nodes.get(node_id)
            if node is None:
                return
            self._forest.apply(Change(put_nodes=(self._touched(node),)))
            self._used.add(node_id)
            if len(self._used) >= _MAX_UNWRITTEN_USES:
                self._write_uses()

    def pin(self, node_id: NodeId) -> None:
        """
        Keep a node from eviction.

        Raises:  UnknownNodeError
        """
        with self._lock:
            self._make(Change(put_nodes=(replace(self.node(node_id), pinned=True),)))

    def unpin(self, node_id: NodeId) -> None:
        """
        Let a node be evicted again.

        Raises:  UnknownNodeError
        """
        with self._lock:
            self._make(Change(put_nodes=(replace(self.node(node_id), pinned=False),)))

    def evict(self, node_id: NodeId) -> Eviction:
        """
        Drop one node. Its children move to its parent, or become roots.

        Raises:  UnknownNodeError; PinnedNodeError
        """
        with self._lock:
            if self.node(node_id).pinned:
                raise PinnedNodeError(node_id)
            return self._drop([node_id])

    def purge(self, namespace: str) -> Eviction:
        """Drop everything of a namespace, pinned nodes too."""
        with self._lock:
            return self._drop([node.node_id for node in self.nodes(namespace)])

    def purge_all(self) -> Eviction:
        """Drop everything."""
        with self._lock:
            return self._drop(list(self._forest.nodes))

    def discard_missing(self, alive: Container[SegmentId]) -> int:
        """
        Drop every node whose KV is not all in `alive`, pinned ones too; for the start.

        Returns the number of nodes dropped. What is then in `alive` but not in `segments()` is
        KV that nobody refers to.
        """
        with self._lock:
            gone = {segment_id for segment_id in self._forest.segments if segment_id not in alive}
            return self._drop(
                [
                    node.node_id
                    for node in self._forest.nodes.values()
                    if not gone.isdisjoint(node.pieces.segment_ids)
                ]
            ).num_nodes

    def _make(self, change: Change) -> None:
        """Store, then make in memory; due use counters go along."""
        if self._storage is not None:
            self._storage.write(change, self._due_uses())
        self._used.clear()
        self._forest.apply(change)

    def _write_uses(self) -> None:
        """Counters may be lost, a request must not: what cannot be written is given up."""
        if self._storage is not None and not self._storage.read_only and self._used:
            try:
                self._storage.write(Change(), self._due_uses())
            except StoreError as exc:
                log.warning("use counters of %d nodes were not stored: %s", len(self._used), exc)
        self._used.clear()

    def _due_uses(self) -> list[Node]:
        return [self._forest.nodes[i] for i in self._used if i in self._forest.nodes]

    def _drop(self, node_ids: Collection[NodeId]) -> Eviction:
        dropped = dict.fromkeys(node_ids)
        moved = recompose(self._forest, dropped.keys())
        freed, num_bytes = self._forest.freed_by((), dropped)
        if dropped:
            self._make(Change(put_nodes=moved, dropped_nodes=tuple(dropped), dropped_segments=freed))
        return Eviction(len(dropped), freed, num_bytes)

    def _insert_first(self, draft: NodeDraft, tokens: TokenIds, script: EditScript | None) -> Insertion:
        now = self._clock()
        node = Node(
            node_id=self._free_node_id(),
            namespace=draft.namespace,
            token_ids=tokens,
            parent=draft.parent,
            script=script,
            pieces=draft.pieces,
            exact_length=draft.exact_length,
            created_at=now,
            last_used_at=now,
            num_hits=0,
            pinned=False,
        )
        check_node(node, parent_of(self._forest, draft), segment_lookup(self._forest, draft))
        needed, unneeded = divide(draft)
        self._make(Change(put_segments=needed, put_nodes=(node,)))
        return _insertion(node, True, unneeded)

    def _insert_again(self, known: Node, draft: NodeDraft) -> Insertion:
        offered = replace(known, pieces=draft.pieces, exact_length=draft.exact_length)
        parent = None if known.parent is None else self.node(known.parent)
        segment_of = segment_lookup(self._forest, draft)
        check_node(offered, parent, segment_of)
        if quality(offered, segment_of) <= quality(known, segment_of):
            self.touch(known.node_id)
            return _insertion(self.node(known.node_id), False, draft.new_segments)
        needed, unneeded = divide(draft)
        node = self._touched(offered)
        freed, num_bytes = self._forest.freed_by([node], ())
        self._make(Change(put_segments=needed, put_nodes=(node,), dropped_segments=freed))
        again = _insertion(node, False, unneeded)
        return replace(
            again,
            freed_segments=again.freed_segments + freed,
            freed_bytes=again.freed_bytes + num_bytes,
        )

    def _touched(self, node: Node) -> Node:
        return replace(node, last_used_at=self._clock(), num_hits=node.num_hits + 1)

    def _free_node_id(self) -> NodeId:
        node_id = self._new_id()
        while node_id in self._forest.nodes:
            node_id = self._new_id()
        return node_id


def _insertion(node: Node, created: bool, unneeded: Sequence[Segment]) -> Insertion:
    return Insertion(
        node=node,
        created=created,
        freed_segments=tuple(segment.segment_id for segment in unneeded),
        freed_bytes=sum(segment.num_bytes for segment in unneeded),
    )
