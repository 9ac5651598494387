"""
The delta tree: which prompts are stored, which descends from which, and which segments they share.

One lock guards every change. A change is computed here; `writing.py` writes it to disk, then applies it in
memory. Tiers hold the KV bytes: each change returns the segments that they can drop.
"""

import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Self

from delta_tree.checks import SegmentLookup, check_forest, check_node, check_parent, quality, segments_with
from delta_tree.errors import (
    EditRangeError,
    InvalidNodeError,
    InvalidTokensError,
    PinnedNodeError,
    StoreCorruptError,
)
from delta_tree.eviction_order import NewQueue
from delta_tree.forest import Forest
from delta_tree.lengths import lengthened, shortened
from delta_tree.node import Change, Eviction, Insertion, Node, NodeDraft, NodeId, NodeIds, Segment, SegmentId
from delta_tree.reading import TreeReader
from delta_tree.spans import TokenIds, token_ids
from delta_tree.storage import Storage
from delta_tree.writing import ChangeWriter, opened_empty


class DeltaTree(TreeReader, AbstractContextManager["DeltaTree"]):
    """Lives as long as the server. Create it with `open`; `close` is idempotent."""

    def __init__(
        self,
        storage: Storage | None,
        forest: Forest,
        clock: Callable[[], float],
        new_id: Callable[[], NodeId],
    ) -> None:
        super().__init__(forest)
        self._writer = ChangeWriter(storage, forest)
        self._clock = clock
        self._new_id = new_id

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
        Return the tree stored at `path`, which is created if it is missing; with None it is in memory only.

        `clock` and `new_id` are for replays, whose results must not depend on the time.
        Raises:  MetadataStoreError: missing (read-only), corrupt, of another identity or version, locked
        """
        forest, new_id = Forest(), new_id or NodeIds()
        if path is None:
            return cls(None, forest, clock, new_id)
        storage = Storage.open(path, identity=identity, read_only=read_only)
        try:
            stored = storage.load()
            forest.restore(stored)
            check_forest(forest)
            storage.upgrade(stored)
        except BaseException as exc:
            storage.close()
            if isinstance(exc, InvalidNodeError | InvalidTokensError | EditRangeError):
                raise StoreCorruptError(path, str(exc)) from exc
            raise
        return cls(storage, forest, clock, new_id)

    @property
    def identity(self) -> str | None:
        """Return what the stored KV depends on, as the file has it; None in memory."""
        return self._writer.identity

    def attach(self, path: Path, *, identity: str) -> None:
        """Move the tree to a file, which has no prompts yet. After a MetadataStoreError all is as before."""
        storage = opened_empty(path, identity)  # waits for another process, so without the lock
        with self._lock:
            self._writer.attach(storage)

    def close(self) -> None:
        """Write use counters and lazy evictions, and release the file."""
        with self._lock:
            self._writer.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def insert(self, draft: NodeDraft, *, groups: Collection[str] = ()) -> Insertion:
        """
        Store a prompt as a node. A new prompt's namespace is put into each of `groups`.

        If the namespace has the prompt already, a use is counted, and the draft's pieces replace the stored
        ones if they are better: a longer exact prefix, or else less deviation, or lower generations.

        Raises:  InvalidNodeError if the draft is not a whole prompt over known segments of its
                 own namespace; MetadataStoreError if it cannot be stored. Then nothing is changed
        """
        try:
            tokens = token_ids(draft.token_ids)
        except InvalidTokensError as exc:
            raise InvalidNodeError(str(exc)) from exc
        with self._lock:
            check_parent(self._forest, draft.namespace, draft.parent)
            segment_of = segments_with(self._forest, draft.namespace, draft.new_segments)
            known = self._forest.find(draft.namespace, tokens)
            if known is not None:
                return self._insert_again(known, draft, segment_of)
            node = draft.as_node(self._free_node_id(), tokens, created_at=self._clock())
            check_node(node, segment_of)
            for group in groups:
                self._forest.put_into(group, draft.namespace)
            try:
                return self._insert_as(node, draft, created=True)
            finally:
                self._forest.forget_if_empty(draft.namespace)

    def touch(self, node_id: NodeId, *, num_copied: int = 0, share: float = 1.0) -> None:
        """
        Count a use of a node. The use is written with the next change, so that a hit costs no transaction.

        An unknown node is ignored: it may have been evicted meanwhile.
        `num_copied`: tokens copied from it for another text. Nodes with a larger total of these are evicted
        later. The total is not written to disk. `share`: the share of the node's tokens that is used
        """
        with self._lock:
            node = self._forest.nodes.get(node_id)
            if node is None:
                return
            if num_copied:
                self._forest.eviction_order.record_copies(node_id, num_copied)
            self._forest.eviction_order.record_share(node_id, share)
            self._writer.note_use(self._touched(node))

    def evict_by(self, new_queue: NewQueue) -> None:
        """Change the eviction policy to that of `new_queue`. What the old queues have learned is lost."""
        with self._lock:
            if new_queue is not self._forest.eviction_order.new_queue:
                self._forest.order_by_last_use(new_queue)

    def put_into(self, group: str, namespace: str) -> None:
        """Let the prompts of this namespace compete for room with all others of the group."""
        with self._lock:
            self._forest.put_into(group, namespace)
            self._forest.forget_if_empty(namespace)

    def age(self, node_id: NodeId, scopes: Collection[str] | None, *, raises_floor: bool = True) -> None:
        """
        Announce that a node is evicted for room. `scopes`: as for `next_to_evict`.

        `raises_floor`: in these scopes, nodes used from now on rank higher than this node did.
        """
        with self._lock:
            self._forest.eviction_order.age(node_id, scopes, raises_floor=raises_floor)

    def pin(self, *node_ids: NodeId) -> None:
        """Protect nodes from eviction: all of them, or none where one is unknown (UnknownNodeError)."""
        self._set_pinned(node_ids, True)

    def unpin(self, *node_ids: NodeId) -> None:
        """Allow eviction again: of all these nodes, or of none where one is unknown (UnknownNodeError)."""
        self._set_pinned(node_ids, False)

    def evict(self, node_id: NodeId, *, lazily: bool = False) -> Eviction:
        """
        Remove one node. Its children move to its parent, or become roots.

        `lazily`: it is deleted from the file with the next change, or when the tree is closed. If the process
        is killed before that, the file still has it; `discard_missing` removes such nodes after `open`.
        Raises:  UnknownNodeError; PinnedNodeError
        """
        with self._lock:
            if self.node(node_id).pinned:
                raise PinnedNodeError(node_id)
            return self._drop([node_id], lazily=lazily)

    def shorten(self, node_id: NodeId, num_tokens: int, *, lazily: bool = False) -> Eviction:
        """
        Remove the end of a prompt. The first `num_tokens` keep its id and its rank in the order of eviction.

        `lazily`: see `evict`
        Raises:  UnknownNodeError; PinnedNodeError; InvalidNodeError if it is not shorter, or already stored
        """
        with self._lock:
            node = self.node(node_id)
            if node.pinned:
                raise PinnedNodeError(node_id)
            shorter = shortened(node, num_tokens)
            if self._forest.find(node.namespace, shorter.token_ids) is not None:
                raise InvalidNodeError(f"another node has the first {num_tokens} tokens of node {node_id}")
            freed, num_bytes = self._forest.freed_by([shorter], ())
            self._writer.store(Change(put_nodes=(shorter,), dropped_segments=freed), lazily=lazily)
            return Eviction(0, freed, num_bytes)

    def lengthen(self, node_id: NodeId, tokens: TokenIds, segments: Sequence[Segment]) -> Node:
        """
        Add to the end of a prompt. It keeps its id and its rank in the order of eviction.

        `tokens` is the whole longer prompt, `segments` the KV of its new tokens in order. If all KV of the
        node is exact, the new KV counts as exact, too.
        Raises:  UnknownNodeError; InvalidNodeError if `tokens` does not continue the node, or is already
                 stored in the namespace; MetadataStoreError. Then nothing is changed
        """
        with self._lock:
            node = self.node(node_id)
            longer = lengthened(node, token_ids(tokens), segments)
            if self._forest.find(node.namespace, longer.token_ids) is not None:
                raise InvalidNodeError(f"another node has these {longer.num_tokens} tokens already")
            check_node(longer, segments_with(self._forest, node.namespace, segments))
            self._writer.store(Change(put_segments=tuple(segments), put_nodes=(longer,)))
            return longer

    def purge_nodes(self, node_ids: Iterable[NodeId]) -> Eviction:
        """Remove these nodes, pinned ones too. Unknown ones are ignored."""
        with self._lock:
            return self._drop([node_id for node_id in node_ids if node_id in self._forest.nodes])

    def discard_missing(self, alive: Container[SegmentId], *, lazily: bool = False) -> int:
        """
        Remove every node with a segment that is not in `alive`, pinned ones too. `lazily`: see `evict`.

        Returns the number of removed nodes. Then the caller may drop what `alive` has and `segments()` lacks.
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
                self._writer.store(Change(put_nodes=changed))

    def _drop(self, node_ids: Iterable[NodeId], *, lazily: bool = False) -> Eviction:
        dropped = tuple(node_ids)
        freed, num_bytes = self._forest.freed_by((), dropped)
        if dropped:
            heirs = self._forest.lineage.heirs(dropped)
            change = Change(dropped_nodes=dropped, heirs=heirs, dropped_segments=freed)
            self._writer.store(change, lazily=lazily)
        return Eviction(len(dropped), freed, num_bytes)

    def _insert_again(self, existing: Node, draft: NodeDraft, segment_of: SegmentLookup) -> Insertion:
        offered = replace(
            existing, pieces=draft.pieces, exact_length=draft.exact_length, deviation=draft.deviation
        )
        check_node(offered, segment_of)
        if quality(offered, segment_of) > quality(existing, segment_of):
            return self._insert_as(self._touched(offered), draft, created=False)
        self.touch(existing.node_id)
        unneeded = tuple(segment.segment_id for segment in draft.new_segments)
        return Insertion(self.node(existing.node_id), False, unneeded)

    def _insert_as(self, node: Node, draft: NodeDraft, *, created: bool) -> Insertion:
        """Store the node with those of the draft's segments that its pieces refer to."""
        used = draft.pieces.segment_ids
        unneeded = (s.segment_id for s in draft.new_segments if s.segment_id not in used)
        freed, _ = self._forest.freed_by([node], ())
        self._writer.store(
            Change(
                put_segments=tuple(s for s in draft.new_segments if s.segment_id in used),
                put_nodes=(node,),
                parents={node.node_id: draft.parent} if created and draft.parent is not None else {},
                dropped_segments=freed,
            )
        )
        return Insertion(node, created, (*unneeded, *freed))

    def _touched(self, node: Node) -> Node:
        return replace(node, last_used_at=self._clock(), num_hits=node.num_hits + 1)

    def _free_node_id(self) -> NodeId:
        node_id = self._new_id()
        while node_id in self._forest.nodes:
            node_id = self._new_id()
        return node_id
