"""
The delta tree: what prompts are stored, how they descend from one another, what they share.

One lock guards every change. A change is worked out, stored, then made in memory: if it cannot be
stored, nothing has happened. KV bytes live elsewhere; each answer says which segments to drop.
"""

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from delta_tree.change import Change, Eviction, Insertion
from delta_tree.checks import SegmentLookup, check_draft, check_forest, check_node, quality
from delta_tree.errors import (
    InvalidNodeError,
    InvalidTokensError,
    PinnedNodeError,
    StoreCorruptError,
    StoreError,
)
from delta_tree.forest import Forest
from delta_tree.node import Node, NodeDraft, NodeId, NodeIds, Segment, SegmentId
from delta_tree.pieces import Piece, PieceTable
from delta_tree.reading import TreeReader
from delta_tree.spans import TokenIds, token_ids
from delta_tree.storage import Storage

log = logging.getLogger(__name__)

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
        self._unwritten: list[Change] = []  # evictions that are not, either

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
            stored = storage.load()
            forest.restore(stored)
            check_forest(forest)
            storage.upgrade(stored)
        except BaseException as exc:
            storage.close()
            if isinstance(exc, InvalidNodeError):
                raise StoreCorruptError(path, str(exc)) from exc
            raise
        return cls(storage, forest, clock=clock, new_id=new_id)

    @property
    def identity(self) -> str | None:
        """What the stored KV depends on, as the file says; None in memory."""
        return None if self._storage is None else self._storage.identity

    def close(self) -> None:
        """Write what is still due, and release the file."""
        with self._lock:
            self._write_uses()
            if self._storage is not None:
                self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def insert(self, draft: NodeDraft) -> Insertion:
        """
        Make a prompt a node. A prompt the namespace has already is touched, and takes the draft's
        pieces if they are better: a longer exact prefix, or else less deviation, or lower generations.

        Raises:  InvalidNodeError if the draft is not a whole prompt over known segments of its
                 own namespace; StoreError if it cannot be stored. Nothing is changed then
        """
        try:
            tokens = token_ids(draft.token_ids)
        except InvalidTokensError as exc:
            raise InvalidNodeError(str(exc)) from exc
        with self._lock:
            check_draft(self._forest, draft)
            known = self._forest.find(draft.namespace, tokens)
            return self._insert_first(draft, tokens) if known is None else self._insert_again(known, draft)

    def touch(self, node_id: NodeId, *, num_given: int = 0) -> None:
        """
        Count a use of a node. One that is gone is ignored: it may have been evicted meanwhile.

        `num_given`: tokens that were copied for another text. The more a node has given, the later it is
        evicted; that is not stored.
        Written to disk with the next change, so that a hit costs no transaction.
        """
        with self._lock:
            node = self._forest.nodes.get(node_id)
            if node is None:
                return
            if num_given:
                self._forest.eviction_order.give(node, num_given)
            self._forest.apply(Change(put_nodes=(self._touched(node),)))
            self._used.add(node_id)
            if len(self._used) >= _MAX_UNWRITTEN_USES:
                self._write_uses()

    def age(self, node_id: NodeId, namespaces: Collection[str] | None) -> None:
        """
        A node is about to leave for room that these namespaces share (None: all): whatever was used before it
        has to be used again to stay as long as what is used from now on.
        """
        with self._lock:
            self._forest.eviction_order.age(node_id, namespaces)

    def pin(self, *node_ids: NodeId) -> None:
        """Keep nodes from eviction: all of them, or none where one is unknown (UnknownNodeError)."""
        self._set_pinned(node_ids, True)

    def unpin(self, *node_ids: NodeId) -> None:
        """Let nodes be evicted again: all of them, or none where one is unknown (UnknownNodeError)."""
        self._set_pinned(node_ids, False)

    def evict(self, node_id: NodeId, *, lazily: bool = False) -> Eviction:
        """
        Drop one node. Its children move to its parent, or become roots.

        `lazily`: it leaves the file with the next change or when the tree is closed. After a kill in between
        it is there again; whoever opens the tree lets `discard_missing` look for KV that is gone.
        Raises:  UnknownNodeError; PinnedNodeError
        """
        with self._lock:
            if self.node(node_id).pinned:
                raise PinnedNodeError(node_id)
            return self._drop([node_id], lazily=lazily)

    def shorten(self, node_id: NodeId, num_tokens: int, *, lazily: bool = False) -> Eviction:
        """
        Drop the end of a prompt; its first `num_tokens` keep its id and its place in the order of use.

        `lazily`: see `evict`
        Raises:  UnknownNodeError; PinnedNodeError; InvalidNodeError where that is no shorter, or a prompt
                 that the namespace has already
        """
        with self._lock:
            node = self.node(node_id)
            if node.pinned:
                raise PinnedNodeError(node_id)
            if not 0 < num_tokens < node.num_tokens:
                raise InvalidNodeError(f"a prompt of {node.num_tokens} tokens cannot keep {num_tokens}")
            kept = token_ids(node.token_ids[:num_tokens])
            if self._forest.find(node.namespace, kept) is not None:
                raise InvalidNodeError(
                    f"the first {num_tokens} tokens of node {node_id} are a prompt already"
                )
            shorter = replace(
                node,
                token_ids=kept,
                pieces=node.pieces.first(num_tokens),
                exact_length=min(node.exact_length, num_tokens),
                deviation=node.deviation if node.exact_length < num_tokens else 0.0,
            )
            freed, num_bytes = self._forest.freed_by([shorter], ())
            self._make(Change(put_nodes=(shorter,), dropped_segments=freed), lazily=lazily)
            return Eviction(0, freed, num_bytes)

    def lengthen(self, node_id: NodeId, tokens: TokenIds, segments: Sequence[Segment]) -> Node:
        """
        Add to the end of a prompt; it keeps its id and its place in the order of use.

        `tokens` are all of it, `segments` what was computed for those that are new, in order. They are exact
        where the node is.
        Raises:  UnknownNodeError; InvalidNodeError where that does not continue the node, or is a prompt that
                 the namespace has already; StoreError. Nothing is changed then
        """
        with self._lock:
            node = self.node(node_id)
            whole = token_ids(tokens)
            continues = len(whole) > node.num_tokens and np.array_equal(
                whole[: node.num_tokens], node.token_ids
            )
            if not continues:
                raise InvalidNodeError(
                    f"{len(whole)} tokens do not continue the {node.num_tokens} of node {node_id}"
                )
            if self._forest.find(node.namespace, whole) is not None:
                raise InvalidNodeError(f"what node {node_id} would become is a prompt already")
            added = (Piece(segment.segment_id, 0, segment.num_tokens) for segment in segments)
            longer = replace(
                node,
                token_ids=whole,
                pieces=PieceTable([*node.pieces, *added]),
                exact_length=len(whole) if node.exact_length == node.num_tokens else node.exact_length,
            )
            draft = NodeDraft(
                namespace=node.namespace,
                token_ids=whole,
                parent=None,
                pieces=longer.pieces,
                new_segments=tuple(segments),
                exact_length=longer.exact_length,
            )
            check_draft(self._forest, draft)
            check_node(longer, self._segment_lookup(draft))
            self._make(Change(put_segments=draft.new_segments, put_nodes=(longer,)))
            return longer

    def purge(self, namespace: str) -> Eviction:
        """Drop everything of a namespace, pinned nodes too."""
        with self._lock:
            return self._drop([node.node_id for node in self.nodes(namespace)])

    def purge_all(self) -> Eviction:
        """Drop everything."""
        with self._lock:
            return self._drop(list(self._forest.nodes))

    def discard_missing(self, alive: Container[SegmentId], *, lazily: bool = False) -> int:
        """
        Drop every node whose KV is not all in `alive`, pinned ones too. `lazily`: see `evict`.

        Returns the number of nodes dropped. What is then in `alive` but not in `segments()` is
        KV that nobody refers to.
        """
        with self._lock:
            gone = {segment_id for segment_id in self._forest.segments if segment_id not in alive}
            nodes = self._forest.nodes.values()
            lost = [node.node_id for node in nodes if not gone.isdisjoint(node.pieces.segment_ids)]
            return self._drop(lost, lazily=lazily).num_nodes

    def _set_pinned(self, node_ids: Iterable[NodeId], pinned: bool) -> None:
        with self._lock:
            nodes = [self.node(node_id) for node_id in dict.fromkeys(node_ids)]
            changed = tuple(replace(node, pinned=pinned) for node in nodes if node.pinned != pinned)
            if changed:
                self._make(Change(put_nodes=changed))

    def _make(self, change: Change, *, lazily: bool = False) -> None:
        """Store, with what was not written yet, then make in memory; `lazily`: store with the next change."""
        if lazily and self._storage is not None and self._storage.is_writable:
            self._unwritten.append(change)
        else:
            if self._storage is not None:
                self._storage.write([*self._unwritten, change], self._due_uses())
            self._unwritten.clear()
            self._used.clear()
        self._forest.apply(change)

    def _write_uses(self) -> None:
        """Counters may be lost, a request must not: what cannot be written is given up."""
        if self._storage is not None and self._storage.is_writable and (self._used or self._unwritten):
            try:
                self._storage.write(self._unwritten, self._due_uses())
                self._unwritten.clear()
            except StoreError as exc:
                log.warning("use counters of %d nodes were not stored: %s", len(self._used), exc)
        self._used.clear()

    def _due_uses(self) -> list[Node]:
        return [self._forest.nodes[i] for i in self._used if i in self._forest.nodes]

    def _drop(self, node_ids: Iterable[NodeId], *, lazily: bool = False) -> Eviction:
        dropped = tuple(node_ids)
        freed, num_bytes = self._forest.freed_by((), dropped)
        if dropped:
            heirs = self._forest.lineage.heirs(dropped)
            self._make(Change(dropped_nodes=dropped, heirs=heirs, dropped_segments=freed), lazily=lazily)
        return Eviction(len(dropped), freed, num_bytes)

    def _insert_first(self, draft: NodeDraft, tokens: TokenIds) -> Insertion:
        now = self._clock()
        node = Node(
            node_id=self._free_node_id(),
            namespace=draft.namespace,
            token_ids=tokens,
            pieces=draft.pieces,
            exact_length=draft.exact_length,
            deviation=draft.deviation,
            created_at=now,
            last_used_at=now,
            num_hits=0,
            pinned=False,
        )
        check_node(node, self._segment_lookup(draft))
        return self._insert_as(node, draft, created=True)

    def _insert_again(self, known: Node, draft: NodeDraft) -> Insertion:
        offered = replace(
            known, pieces=draft.pieces, exact_length=draft.exact_length, deviation=draft.deviation
        )
        segment_of = self._segment_lookup(draft)
        check_node(offered, segment_of)
        if quality(offered, segment_of) > quality(known, segment_of):
            return self._insert_as(self._touched(offered), draft, created=False)
        self.touch(known.node_id)
        unneeded = tuple(segment.segment_id for segment in draft.new_segments)
        return Insertion(self.node(known.node_id), False, unneeded)

    def _insert_as(self, node: Node, draft: NodeDraft, *, created: bool) -> Insertion:
        """With those of the draft's segments that its pieces refer to."""
        used = draft.pieces.segment_ids
        unneeded = (s.segment_id for s in draft.new_segments if s.segment_id not in used)
        freed, _ = self._forest.freed_by([node], ())
        self._make(
            Change(
                put_segments=tuple(s for s in draft.new_segments if s.segment_id in used),
                put_nodes=(node,),
                parents={node.node_id: draft.parent} if created and draft.parent is not None else {},
                dropped_segments=freed,
            )
        )
        return Insertion(node, created, (*unneeded, *freed))

    def _segment_lookup(self, draft: NodeDraft) -> SegmentLookup:
        """Segments of the draft and of the tree, by id."""
        new = {segment.segment_id: segment for segment in draft.new_segments}
        return lambda segment_id: new.get(segment_id) or self._forest.segments.get(segment_id)

    def _touched(self, node: Node) -> Node:
        return replace(node, last_used_at=self._clock(), num_hits=node.num_hits + 1)

    def _free_node_id(self) -> NodeId:
        node_id = self._new_id()
        while node_id in self._forest.nodes:
            node_id = self._new_id()
        return node_id
