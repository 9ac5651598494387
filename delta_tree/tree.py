"""
The delta tree: what prompts are stored, how they descend from one another, what they share.

One lock guards every change and every question over many nodes; looking up a single node or
segment takes no lock. A change is worked out, stored, then made in memory: if it cannot be stored
nothing has happened. KV bytes live elsewhere; each answer says which segments to drop.
"""

import threading
import time
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from delta_tree.align import align
from delta_tree.answers import (
    Eviction,
    Insertion,
    Sharing,
    TreeStats,
    measure,
    owned_bytes,
    shared_with,
    subtree_bytes,
)
from delta_tree.checks import check_node, check_segment
from delta_tree.errors import (
    InvalidNodeError,
    InvalidTokensError,
    PinnedNodeError,
    StoreCorruptError,
    UnknownNodeError,
)
from delta_tree.forest import Change, Forest, recompose
from delta_tree.node import Node, NodeDraft, NodeId, Segment, SegmentId, new_node_id
from delta_tree.script import EditScript
from delta_tree.spans import TokenIds, token_ids
from delta_tree.storage import Storage

_SCRIPT_MIN_RUN = 16  # a script tells how prompts descend; one-token matches would tell nothing
_MAX_UNWRITTEN_USES = 256


class DeltaTree:
    """Lives as long as the server. Use `open`; `close` is idempotent."""

    def __init__(
        self, storage: Storage | None, forest: Forest, *, clock: Callable[[], float]
    ) -> None:
        self._storage = storage
        self._forest = forest
        self._clock = clock
        self._lock = threading.RLock()
        self._used: set[NodeId] = set()  # nodes whose use counters are not on disk yet

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        identity: str,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """
        The tree stored at `path`, a file made if it is missing; None keeps it in memory only.

        Raises:  StoreError: missing (read-only), corrupt, of another identity or version, locked
        """
        forest = Forest()
        if path is None:
            return cls(None, forest, clock=clock)
        storage = Storage.open(path, identity=identity, read_only=read_only)
        try:
            segments, nodes = storage.load()
            _fill(forest, segments, nodes, path)
        except BaseException:
            storage.close()
            raise
        return cls(storage, forest, clock=clock)

    def close(self) -> None:
        """Write the use counters that are still due, and release the file."""
        with self._lock:
            if self._storage is not None and not self._storage.closed:
                try:
                    self._write_uses()
                finally:
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

    # --- one node or segment: no lock, a dictionary look-up -------------------------------------

    def get(self, node_id: NodeId) -> Node | None:
        """The node with this id, or None."""
        return self._forest.nodes.get(node_id)

    def node(self, node_id: NodeId) -> Node:
        """
        The node with this id.

        Raises:  UnknownNodeError
        """
        return self._forest.node(node_id)

    def segment(self, segment_id: SegmentId) -> Segment:
        """
        The segment with this id.

        Raises:  UnknownSegmentError
        """
        return self._forest.segment(segment_id)

    def find(self, namespace: str, tokens: Sequence[int] | TokenIds) -> Node | None:
        """The node of exactly this prompt in this namespace, or None."""
        return self._forest.find(namespace, token_ids(tokens))

    def reference_count(self, segment_id: SegmentId) -> int:
        """How many nodes refer to a segment; 0 if there is no such segment."""
        return self._forest.references.get(segment_id, 0)

    # --- changes --------------------------------------------------------------------------------

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
        parent = self._parent_of(draft)
        # Aligned before the lock is taken: it may take long, and tokens never change.
        script = None
        if parent is not None and known is None:
            script = align(parent.token_ids, tokens, min_run=_SCRIPT_MIN_RUN)
        with self._lock:
            known = self._forest.find(draft.namespace, tokens)
            parent = self._parent_of(draft)
            self._check_segments(draft)
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

    # --- questions over many nodes --------------------------------------------------------------

    def nodes(self, namespace: str | None = None) -> tuple[Node, ...]:
        """All nodes, or those of one namespace, in order of insertion."""
        with self._lock:
            return tuple(
                node
                for node in self._forest.nodes.values()
                if namespace is None or node.namespace == namespace
            )

    def segments(self, namespace: str | None = None) -> tuple[Segment, ...]:
        """All segments that nodes refer to, or those of one namespace."""
        with self._lock:
            return tuple(
                segment
                for segment in self._forest.segments.values()
                if namespace is None or segment.namespace == namespace
            )

    def children(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """
        The nodes whose script starts from this one.

        Raises:  UnknownNodeError
        """
        with self._lock:
            self.node(node_id)
            return self._forest.children(node_id)

    def eviction_candidates(self, namespace: str | None = None) -> tuple[Node, ...]:
        """The nodes that are not pinned, least recently used first."""
        unpinned = [node for node in self.nodes(namespace) if not node.pinned]
        return tuple(sorted(unpinned, key=lambda node: node.last_used_at))

    def stats(self, namespace: str | None = None) -> TreeStats:
        """Figures over all nodes, or those of one namespace."""
        with self._lock:
            return measure(self._forest, self.nodes(namespace))

    def owned_bytes(self, node_id: NodeId) -> int:
        """
        KV bytes that only this node refers to: what its eviction would free.

        Raises:  UnknownNodeError
        """
        with self._lock:
            return owned_bytes(self._forest, self.node(node_id))

    def subtree_bytes(self, node_id: NodeId) -> int:
        """
        KV bytes that only this node and its descendants refer to.

        Raises:  UnknownNodeError
        """
        with self._lock:
            self.node(node_id)
            return subtree_bytes(self._forest, node_id)

    def shared_with(self, node_id: NodeId) -> tuple[Sharing, ...]:
        """
        The nodes that refer to the same KV as this one, and for how many of its tokens.

        Raises:  UnknownNodeError
        """
        with self._lock:
            return shared_with(self._forest, self.node(node_id))

    # --- how a change is made -------------------------------------------------------------------

    def _make(self, change: Change) -> None:
        """Store, then make in memory; due use counters go along."""
        if self._storage is not None:
            self._storage.write(change, self._due_uses())
        self._used.clear()
        self._forest.apply(change)

    def _write_uses(self) -> None:
        if self._storage is not None and not self._storage.read_only and self._used:
            self._storage.write(Change(), self._due_uses())
        self._used.clear()

    def _due_uses(self) -> list[Node]:
        return [self._forest.nodes[i] for i in self._used if i in self._forest.nodes]

    def _drop(self, node_ids: Collection[NodeId]) -> Eviction:
        dropped = dict.fromkeys(node_ids)
        moved = recompose(self._forest, dropped.keys())
        freed, num_bytes = self._forest.freed_by((), dropped)
        if dropped:
            self._make(
                Change(put_nodes=moved, dropped_nodes=tuple(dropped), dropped_segments=freed)
            )
        return Eviction(len(dropped), freed, num_bytes)

    def _insert_first(
        self, draft: NodeDraft, tokens: TokenIds, script: EditScript | None
    ) -> Insertion:
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
        check_node(node, self._parent_of(draft), self._lookup(draft))
        needed, unneeded = _divide(draft)
        self._make(Change(put_segments=needed, put_nodes=(node,)))
        return _insertion(node, True, unneeded)

    def _insert_again(self, known: Node, draft: NodeDraft) -> Insertion:
        offered = replace(known, pieces=draft.pieces, exact_length=draft.exact_length)
        parent = None if known.parent is None else self.node(known.parent)
        segment_of = self._lookup(draft)
        check_node(offered, parent, segment_of)
        if _quality(offered, segment_of) <= _quality(known, segment_of):
            self.touch(known.node_id)
            return _insertion(self.node(known.node_id), False, draft.new_segments)
        needed, unneeded = _divide(draft)
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
        node_id = new_node_id()
        while node_id in self._forest.nodes:
            node_id = new_node_id()
        return node_id

    def _parent_of(self, draft: NodeDraft) -> Node | None:
        if draft.parent is None:
            return None
        parent = self.get(draft.parent)
        if parent is None:
            raise InvalidNodeError(f"the parent, node {draft.parent}, is not in the tree")
        if parent.namespace != draft.namespace:
            raise InvalidNodeError(f"the parent, node {draft.parent}, is in another namespace")
        return parent

    def _check_segments(self, draft: NodeDraft) -> None:
        seen: set[SegmentId] = set()
        for segment in draft.new_segments:
            check_segment(segment)
            if segment.namespace != draft.namespace:
                raise InvalidNodeError(
                    f"segment {segment.segment_id} belongs to another namespace"
                )
            if segment.segment_id in seen or segment.segment_id in self._forest.segments:
                raise InvalidNodeError(f"segment {segment.segment_id} is there twice")
            seen.add(segment.segment_id)

    def _lookup(self, draft: NodeDraft) -> Callable[[SegmentId], Segment | None]:
        new = {segment.segment_id: segment for segment in draft.new_segments}
        stored = self._forest.segments
        return lambda segment_id: new.get(segment_id) or stored.get(segment_id)


def _quality(node: Node, segment_of: Callable[[SegmentId], Segment | None]) -> tuple[int, int]:
    """What makes one way to hold a prompt's KV better than another; larger is better."""
    staleness = 0
    for piece in node.pieces:
        segment = segment_of(piece.segment_id)
        assert segment is not None  # the node has been checked
        staleness += segment.generation * piece.length
    return node.exact_length, -staleness


def _divide(draft: NodeDraft) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The draft's new segments: those its pieces refer to, and the others."""
    used = draft.pieces.segment_ids
    needed = tuple(segment for segment in draft.new_segments if segment.segment_id in used)
    return needed, tuple(s for s in draft.new_segments if s.segment_id not in used)


def _insertion(node: Node, created: bool, unneeded: Sequence[Segment]) -> Insertion:
    return Insertion(
        node=node,
        created=created,
        freed_segments=tuple(segment.segment_id for segment in unneeded),
        freed_bytes=sum(segment.num_bytes for segment in unneeded),
    )


def _fill(forest: Forest, segments: list[Segment], nodes: list[Node], path: Path) -> None:
    """Take over what was loaded, if it is what a tree would have stored."""
    forest.apply(Change(put_segments=tuple(segments), put_nodes=tuple(nodes)))
    try:
        for segment in segments:
            check_segment(segment)
        for node in nodes:
            parent = None if node.parent is None else forest.node(node.parent)
            check_node(node, parent, forest.segments.get)
    except (InvalidNodeError, UnknownNodeError) as exc:
        raise StoreCorruptError(path, str(exc)) from exc
    rooted = sum(len(forest.subtree(node.node_id)) for node in nodes if node.parent is None)
    if rooted != len(nodes):
        raise StoreCorruptError(path, f"{len(nodes) - rooted} nodes descend from no root")
    if forest.references.keys() != forest.segments.keys():
        raise StoreCorruptError(path, "a segment belongs to no node")
