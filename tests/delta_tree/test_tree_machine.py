"""A stateful test: whatever is done to a tree, it equals a plain dictionary."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from delta_tree import (
    DeltaTree,
    InvalidNodeError,
    Node,
    NodeId,
    PinnedNodeError,
    SegmentId,
    token_ids,
)
from tests.delta_tree.fake_prompts import child_draft, fresh_draft, segment

NAMESPACES = ("tenant-a", "tenant-b")
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def ids_of(nodes: Iterable[Node]) -> set[NodeId]:
    return {node.node_id for node in nodes}


@dataclass
class Known:
    """What the model knows of a node."""

    node_id: NodeId
    parent: NodeId | None
    segment_ids: frozenset[SegmentId]
    pinned: bool = False


class TreeMachine(RuleBasedStateMachine):
    """Inserts, evicts, shortens, lengthens, pins, purges and reopens, beside a dictionary keyed by prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.model: dict[tuple[str, tuple[int, ...]], Known] = {}
        self.num_bytes: dict[SegmentId, int] = {}
        self.unpinned: set[NodeId] = set()  # since their last use
        self.generous: set[NodeId] = set()  # gave to others: they leave later

    @initialize()
    def start(self) -> None:
        """Open an empty store."""
        self.tree = DeltaTree.open(self.folder / "tree.sqlite", identity="model")

    def teardown(self) -> None:
        """Leave no file behind."""
        self.tree.close()
        shutil.rmtree(self.folder)

    def key_of(self, data: st.DataObject) -> tuple[str, tuple[int, ...]]:
        """One of the prompts in the model."""
        return data.draw(st.sampled_from(sorted(self.model)))

    def freed(self, before: set[SegmentId]) -> set[SegmentId]:
        """The segments that no node of the model refers to any more."""
        return before - self.referred()

    def referred(self) -> set[SegmentId]:
        """All segments that nodes of the model refer to."""
        return {s for known in self.model.values() for s in known.segment_ids}

    @rule(namespace=st.sampled_from(NAMESPACES), ids=prompts)
    def insert_root(self, namespace: str, ids: list[int]) -> None:
        """Insert a prompt computed in full."""
        draft = fresh_draft(ids, namespace=namespace)
        made = self.tree.insert(draft)
        key = (namespace, tuple(ids))
        assert made.created == (key not in self.model)
        self.num_bytes.update({s.segment_id: s.num_bytes for s in draft.new_segments})
        before = self.referred() | draft.pieces.segment_ids
        known = self.model.setdefault(key, Known(made.node.node_id, None, made.node.pieces.segment_ids))
        assert known.node_id == made.node.node_id
        known.segment_ids = made.node.pieces.segment_ids
        assert set(made.freed_segments) == self.freed(before)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), added=prompts)
    def insert_child(self, data: st.DataObject, added: list[int]) -> None:
        """Insert a prompt that keeps the head of another."""
        namespace, ids = self.key_of(data)
        parent = self.tree.node(self.model[namespace, ids].node_id)
        num_kept = data.draw(st.integers(0, len(ids)))
        draft = child_draft(parent, num_kept, added)
        made = self.tree.insert(draft)
        key = (namespace, (*ids[:num_kept], *added))
        self.num_bytes.update({s.segment_id: s.num_bytes for s in draft.new_segments})
        before = self.referred() | {s.segment_id for s in draft.new_segments}
        if key not in self.model:
            self.model[key] = Known(made.node.node_id, parent.node_id, frozenset())
        self.model[key].segment_ids = made.node.pieces.segment_ids
        assert set(made.freed_segments) == self.freed(before)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), lazily=st.booleans())
    def evict(self, data: st.DataObject, lazily: bool) -> None:
        """Evict a node, unless it is pinned."""
        key = self.key_of(data)
        known = self.model[key]
        try:
            gone = self.tree.evict(known.node_id, lazily=lazily)
        except PinnedNodeError:
            assert known.pinned
            return
        assert not known.pinned
        before = self.referred()
        del self.model[key]
        for other in self.model.values():
            if other.parent == known.node_id:
                other.parent = known.parent
        assert set(gone.freed_segments) == self.freed(before)
        assert gone.freed_bytes == sum(self.num_bytes[s] for s in gone.freed_segments)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), lazily=st.booleans())
    def shorten(self, data: st.DataObject, lazily: bool) -> None:
        """Evict a prompt's end, unless it is pinned or what is left is a prompt already."""
        namespace, ids = key = self.key_of(data)
        num_kept = data.draw(st.integers(0, len(ids)))
        known, shorter = self.model[key], (namespace, ids[:num_kept])
        last_used_at = self.tree.node(known.node_id).last_used_at
        try:
            gone = self.tree.shorten(known.node_id, num_kept, lazily=lazily)
        except (PinnedNodeError, InvalidNodeError):
            assert known.pinned or num_kept in (0, len(ids)) or shorter in self.model
            return
        assert not known.pinned
        before, node = self.referred(), self.tree.node(known.node_id)
        self.model[shorter] = self.model.pop(key)
        known.segment_ids = node.pieces.segment_ids
        assert (node.num_tokens, node.last_used_at) == (num_kept, last_used_at)
        assert self.tree.find(*key) is None
        assert set(gone.freed_segments) == self.freed(before)
        assert gone.freed_bytes == sum(self.num_bytes[s] for s in gone.freed_segments)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), added=prompts, wrong=st.booleans())
    def lengthen(self, data: st.DataObject, added: list[int], wrong: bool) -> None:
        """Add to a prompt's end, unless it does not continue it, or what it becomes is a prompt already."""
        namespace, ids = key = self.key_of(data)
        known = self.model[key]
        before = self.tree.node(known.node_id)
        longer = (*((ids[0] + 1) % 3, *ids[1:]), *added) if wrong else (*ids, *added)
        new = segment(len(added), first_position=len(ids), namespace=namespace)
        try:
            node = self.tree.lengthen(known.node_id, token_ids(longer), [new])
        except InvalidNodeError:
            assert wrong or (namespace, longer) in self.model
            assert self.tree.find(*key) is not None
            return
        assert not wrong
        self.num_bytes[new.segment_id] = new.num_bytes
        self.model[namespace, longer] = self.model.pop(key)
        known.segment_ids = node.pieces.segment_ids
        assert known.segment_ids == before.pieces.segment_ids | {new.segment_id}
        assert (node.node_id, node.last_used_at) == (before.node_id, before.last_used_at)
        assert (node.exact_length == len(longer)) == (before.exact_length == len(ids))
        assert self.tree.find(namespace, token_ids(ids)) is None

    @precondition(lambda self: self.model)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        """Pin or unpin a node."""
        known = self.model[self.key_of(data)]
        if known.pinned and not pinned:
            self.unpinned.add(known.node_id)  # it is the last in the order now
        known.pinned = pinned
        (self.tree.pin if pinned else self.tree.unpin)(known.node_id)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), num_copied=st.sampled_from([0, 0, 7]))
    def touch(self, data: st.DataObject, num_copied: int) -> None:
        """Use a node, now and then for another text."""
        node_id = self.model[self.key_of(data)].node_id
        self.unpinned.discard(node_id)
        if num_copied:
            self.generous.add(node_id)
        self.tree.touch(node_id, num_copied=num_copied)

    @rule(namespace=st.sampled_from(NAMESPACES))
    def purge(self, namespace: str) -> None:
        """Purge a namespace: nothing of it is left."""
        before = self.referred()
        self.model = {key: known for key, known in self.model.items() if key[0] != namespace}
        gone = self.tree.purge_nodes(node.node_id for node in self.tree.nodes(namespace))
        assert set(gone.freed_segments) == self.freed(before)
        assert self.tree.nodes(namespace) == ()
        assert namespace not in {segment.namespace for segment in self.tree.segments()}

    @rule(data=st.data())
    def lose_a_segment(self, data: st.DataObject) -> None:
        """A segment's KV is gone at the start: every node that needs it leaves."""
        alive = self.referred()
        if alive:
            alive.discard(data.draw(st.sampled_from(sorted(alive))))
        lost = {k.node_id: k for k in self.model.values() if not k.segment_ids <= alive}
        self.model = {k: known for k, known in self.model.items() if known.node_id not in lost}
        for known in self.model.values():
            while known.parent in lost:
                known.parent = lost[known.parent].parent
        assert self.tree.discard_missing(alive) == len(lost)

    @rule()
    def reopen(self) -> None:
        """Close and open again: everything is as it was."""
        before = [
            (n.node_id, self.tree.ancestors(n.node_id), n.pieces, n.exact_length, n.num_hits, n.last_used_at)
            for n in self.tree.nodes()
        ]
        self.tree.close()
        self.unpinned.clear()
        self.generous.clear()
        self.tree = DeltaTree.open(self.folder / "tree.sqlite", identity="model")
        after = [
            (n.node_id, self.tree.ancestors(n.node_id), n.pieces, n.exact_length, n.num_hits, n.last_used_at)
            for n in self.tree.nodes()
        ]
        assert sorted(after, key=lambda row: row[0]) == sorted(before, key=lambda row: row[0])

    @invariant()
    def equals_the_model(self) -> None:
        """The tree holds the prompts of the model, each with its parent, pin and pieces."""
        held = {(n.namespace, tuple(n.token_ids.tolist())): n for n in self.tree.nodes()}
        assert held.keys() == self.model.keys()
        for key, known in self.model.items():
            node = held[key]
            parents = self.tree.ancestors(node.node_id)
            assert (node.node_id, *parents[:1]) == (known.node_id, *filter(None, [known.parent]))
            assert (node.pinned, node.pieces.segment_ids) == (known.pinned, known.segment_ids)
            assert node.pieces.num_tokens == node.num_tokens
            assert self.tree.find(*key) is node

    @invariant()
    def the_least_recently_used_leave_first(self) -> None:
        """The order kept at hand is that of the times, and pinned nodes are not in it."""
        for namespace in (None, *NAMESPACES):
            order: list[Node] = []
            scope = None if namespace is None else [namespace]
            while (node := self.tree.next_to_evict(scope, without=ids_of(order))) is not None:
                order.append(node)
            held = {n.node_id for n in self.tree.nodes(namespace) if not n.pinned}
            assert ids_of(order) == held
            unmoved = [n.last_used_at for n in order if n.node_id not in self.unpinned | self.generous]
            assert unmoved == sorted(unmoved)

    @invariant()
    def no_parent_dangles(self) -> None:
        """Every ancestor exists, and each lists the next one as its child."""
        for node in self.tree.nodes():
            line = [node.node_id, *self.tree.ancestors(node.node_id)]
            for child, parent in pairwise(line):
                assert child in self.tree.children(parent)

    @invariant()
    def counts_and_bytes_add_up(self) -> None:
        """References, bytes and statistics are what counting them anew gives."""
        counts = Counter(s for known in self.model.values() for s in known.segment_ids)
        assert {s.segment_id for s in self.tree.segments()} == counts.keys()
        assert all(self.tree.reference_count(s) == n for s, n in counts.items())
        stats, nodes = self.tree.stats(), self.tree.nodes()
        whole = [self.tree.stats(namespace) for namespace in NAMESPACES]
        for figure in ("num_nodes", "num_roots", "num_pinned", "num_segments", "num_tokens"):
            assert getattr(stats, figure) == sum(getattr(one, figure) for one in whole)
        assert stats.num_stored_tokens == sum(one.num_stored_tokens for one in whole)
        assert stats.max_depth == max(one.max_depth for one in whole)
        assert stats.num_bytes == sum(self.num_bytes[s] for s in counts)
        assert stats.num_nodes == len(self.model)
        assert stats.num_pinned == sum(known.pinned for known in self.model.values())
        assert stats.num_tokens == sum(len(ids) for _, ids in self.model)
        assert stats.max_depth == max((1 + len(self.tree.ancestors(n.node_id)) for n in nodes), default=0)
        roots = [node for node in nodes if not self.tree.ancestors(node.node_id)]
        assert (stats.num_roots, self.tree.roots()) == (len(roots), tuple(roots))
        sizes = {node.node_id: self.tree.subtree_bytes(node.node_id) for node in nodes}
        assert self.tree.bytes_of_subtrees(sizes) == sizes
        assert len(roots) != 1 or sizes[roots[0].node_id] == stats.num_bytes


TestTree = TreeMachine.TestCase
TestTree.__doc__ = "Inserting, evicting, pinning, purging and reopening keep tree and model equal."
TestTree.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
