"""
All nodes and segments in memory, with indexes by prompt, parent, reference and order of eviction.

tree.py computes each change as a value, writes it to disk, and then applies it here. Uses and evictions for
room are applied first, and written with the next change. tree.py also holds the lock.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from delta_tree.errors import InvalidNodeError
from delta_tree.eviction_order import EvictionOrder, NewQueue, Origin
from delta_tree.lineage import Lineage
from delta_tree.node import Change, Node, NodeId, Segment, SegmentId
from delta_tree.spans import TokenIds


def prompt_key(namespace: str, tokens: TokenIds) -> bytes:
    """Return a 16-byte hash of a namespace and a prompt; the length of the name separates the two."""
    name = namespace.encode()
    digest = hashlib.blake2b(digest_size=16, person=b"kvshare-prompt")
    digest.update(len(name).to_bytes(8, "little") + name + tokens.astype("<i4", copy=False).data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Figures over all nodes, or those of one namespace."""

    num_nodes: int
    num_roots: int
    num_pinned: int
    num_segments: int
    num_tokens: int  # of all prompts together
    num_stored_tokens: int  # of all segments: less than `num_tokens` where prompts share
    num_bytes: int  # KV bytes of all segments
    max_depth: int  # nodes on the longest path from a root; 0 without nodes


class Totals:
    """Sums over all nodes and segments, or over those of one namespace."""

    def __init__(self) -> None:
        self.pinned: set[NodeId] = set()
        self._num_at: Counter[int] = Counter()  # nodes by depth; a root has depth 1
        self._num_nodes = 0
        self._num_tokens = 0
        self._num_segments = 0
        self._num_stored_tokens = 0
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._num_nodes or self._num_segments)

    def stats(self) -> TreeStats:
        return TreeStats(
            num_nodes=self._num_nodes,
            num_roots=self._num_at.get(1, 0),
            num_pinned=len(self.pinned),
            num_segments=self._num_segments,
            num_tokens=self._num_tokens,
            num_stored_tokens=self._num_stored_tokens,
            num_bytes=self._num_bytes,
            max_depth=max(self._num_at, default=0),  # one C call over ints, so atomic between threads
        )

    def add_segment(self, segment: Segment, sign: int = 1) -> None:
        """Add a segment, or with `sign` -1 subtract it."""
        self._num_segments += sign
        self._num_stored_tokens += sign * segment.num_tokens
        self._num_bytes += sign * segment.num_bytes

    def replace_node(self, old: Node | None, new: Node | None, grown: Mapping[int, int]) -> None:
        """Count a node that was added (`old` None), changed or removed; `grown`: more nodes at each depth."""
        self._num_nodes += (new is not None) - (old is not None)
        self._num_tokens += (new.num_tokens if new else 0) - (old.num_tokens if old else 0)
        if new is not None and new.pinned:
            self.pinned.add(new.node_id)
        elif old is not None:
            self.pinned.discard(old.node_id)
        for depth, number in grown.items():
            self._num_at[depth] += number
            if not self._num_at[depth]:
                del self._num_at[depth]


class Forest:
    """The trees of prompts of all namespaces, and the segments they refer to."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, Node] = {}
        self.segments: dict[SegmentId, Segment] = {}
        # How many nodes refer to a segment, where more than one does. Most segments have one, and their
        # dictionary entries would take more memory than the segments themselves.
        self._references: dict[SegmentId, int] = {}
        self._by_prompt: dict[bytes, NodeId] = {}
        self._totals: defaultdict[str | None, Totals] = defaultdict(Totals)  # by namespace; None: all nodes
        self._bytes_of_groups: Counter[str] = Counter()  # only groups with KV
        self.lineage = Lineage()
        self.eviction_order = EvictionOrder()

    def num_references(self, segment_id: SegmentId) -> int:
        """Return how many nodes refer to a segment; 0 if there is no such segment."""
        return self._references.get(segment_id, 1) if segment_id in self.segments else 0

    def find(self, namespace: str, tokens: TokenIds) -> Node | None:
        """Return the node of exactly this prompt, or None: looked up by hash, then compared by tokens."""
        node_id = self._by_prompt.get(prompt_key(namespace, tokens))
        node = None if node_id is None else self.nodes.get(node_id)
        if node is None or node.namespace != namespace:
            return None
        return node if np.array_equal(node.token_ids, tokens) else None

    def totals(self, namespace: str | None = None) -> Totals:
        """Return the totals of all nodes, or of those of one namespace."""
        return self._totals.get(namespace) or Totals()

    def put_into(self, group: str, namespace: str) -> None:
        """Put a namespace into a group: its nodes compete with the group's, and its bytes count there."""
        if self.eviction_order.put_into(group, namespace):
            self._add_bytes(group, self.totals(namespace).stats().num_bytes)

    def bytes_of_groups(self) -> Counter[str]:
        """Return the KV bytes of each group that has any. The caller must not change the result."""
        return self._bytes_of_groups

    def freed_by(self, put: Iterable[Node], dropped: Iterable[NodeId]) -> tuple[tuple[SegmentId, ...], int]:
        """Return the segments that no node refers to after this change, and the sum of their bytes."""
        lost: Counter[SegmentId] = Counter()
        for node in put:
            if node.node_id in self.nodes:
                lost.update(self.nodes[node.node_id].pieces.segment_ids)
            lost.subtract(node.pieces.segment_ids)
        for node_id in dropped:
            lost.update(self.nodes[node_id].pieces.segment_ids)
        freed = tuple(
            segment_id
            for segment_id, count in lost.items()
            if count > 0 and self.num_references(segment_id) == count
        )
        return freed, sum(self.segments[segment_id].num_bytes for segment_id in freed)

    def bytes_only_of(self, node_ids: Iterable[NodeId]) -> int:
        """Return the bytes of the segments to which only these nodes refer. Each node is named once."""
        num_bytes, shared = 0, Counter[SegmentId]()
        for node_id in node_ids:
            for segment_id in self.nodes[node_id].pieces.segment_ids:
                if segment_id in self._references:
                    shared[segment_id] += 1
                else:
                    num_bytes += self.segments[segment_id].num_bytes
        whole = (each for each, count in shared.items() if count == self._references[each])
        return num_bytes + sum(self.segments[segment_id].num_bytes for segment_id in whole)

    def apply(self, change: Change) -> None:
        """Apply a change that is on disk, or that will be written with the next one."""
        unclaimed = {segment.segment_id for segment in change.put_segments}
        for segment in change.put_segments:
            self.segments[segment.segment_id] = segment
            self._count_segment(segment, 1)
        for node in change.put_nodes:
            self._put(node, change.parents.get(node.node_id), unclaimed)
        # The newest first: in a purge, children go before their parents, so that none has to be moved.
        for node_id in reversed(change.dropped_nodes):
            self._drop(node_id)
        for segment_id in change.dropped_segments:
            segment = self.segments.pop(segment_id)
            self._count_segment(segment, -1)
            self.forget_if_empty(segment.namespace)

    def forget_if_empty(self, namespace: str) -> None:
        """Keep nothing of a namespace that has neither nodes nor segments."""
        if not self._totals.get(namespace):
            self._totals.pop(namespace, None)
            self.eviction_order.forget(namespace)

    def content(self) -> Change:
        """Return all nodes and segments as one change to an empty forest."""
        parents = {
            node_id: parent for node_id in self.nodes if (parent := self.lineage.parent(node_id)) is not None
        }
        return Change(tuple(self.segments.values()), tuple(self.nodes.values()), parents)

    def restore(self, stored: Change) -> None:
        """Apply what was loaded to an empty forest. Raises InvalidNodeError if nodes descend from no root."""
        waiting: defaultdict[NodeId | None, list[Node]] = defaultdict(list)
        for node in stored.put_nodes:
            waiting[stored.parents.get(node.node_id)].append(node)
        rooted = waiting.pop(None, [])
        for node in rooted:
            rooted += waiting.pop(node.node_id, ())
        if waiting:
            raise InvalidNodeError(f"{len(stored.put_nodes) - len(rooted)} nodes descend from no root")
        self.apply(replace(stored, put_nodes=tuple(rooted)))
        self.nodes = {node.node_id: node for node in stored.put_nodes}  # in order of insertion again
        self.order_by_last_use()

    def order_by_last_use(self, new_queue: NewQueue | None = None) -> None:
        """Rank all nodes again as if each had been used once, at its last use. `new_queue`: a new policy."""
        self.eviction_order = self.eviction_order.emptied(new_queue)
        for node in sorted(self.nodes.values(), key=attrgetter("last_used_at")):
            self.eviction_order.record_use(node)

    def _put(self, node: Node, parent: NodeId | None, unclaimed: set[SegmentId]) -> None:
        old = self.nodes.get(node.node_id)
        self.nodes[node.node_id] = node
        grown = self.lineage.add(node.node_id, parent) if old is None else {}
        for totals in self._totals_with(node.namespace):
            totals.replace_node(old, node, grown)
        if old is None or old.pieces != node.pieces:
            self._refer(node, unclaimed)
            if old is not None:
                self._release(old)
        is_resized = old is not None and old.num_tokens != node.num_tokens
        if old is not None and is_resized:
            # A resized node keeps its rank in the order of eviction: that is not a use. Any other change
            # is a use or a pin.
            del self._by_prompt[prompt_key(old.namespace, old.token_ids)]
            if node.num_tokens < old.num_tokens:
                self.eviction_order.shorten(node.node_id, node.num_tokens / old.num_tokens)
        else:
            self._record_use(node)
            if old is None and parent is not None and (above := self.nodes.get(parent)) is not None:
                self.eviction_order.relieve(above)
        if old is None or is_resized:
            self._by_prompt[prompt_key(node.namespace, node.token_ids)] = node.node_id

    def _record_use(self, node: Node) -> None:
        self.eviction_order.record_use(node, origin=lambda: self._origin(node))

    def _origin(self, node: Node) -> Origin:
        """Return its parent, and the number of its leading tokens whose KV other nodes refer to as well."""
        parent, num_found = self.lineage.parent(node.node_id), 0
        for start, segment_id, _, length in node.pieces.rows():
            if self.num_references(segment_id) < 2:
                break
            num_found = start + length
        return None if parent is None else self.nodes.get(parent), num_found

    def _drop(self, node_id: NodeId) -> None:
        node = self.nodes.pop(node_id)
        del self._by_prompt[prompt_key(node.namespace, node.token_ids)]
        self._release(node)
        grown = self.lineage.remove(node_id)
        for totals in self._totals_with(node.namespace):
            totals.replace_node(node, None, grown)
        self.eviction_order.remove(node)

    def _count_segment(self, segment: Segment, sign: int) -> None:
        for totals in self._totals_with(segment.namespace):
            totals.add_segment(segment, sign)
        for group in self.eviction_order.groups_of(segment.namespace):
            self._add_bytes(group, sign * segment.num_bytes)

    def _add_bytes(self, group: str, num_bytes: int) -> None:
        self._bytes_of_groups[group] += num_bytes
        if not self._bytes_of_groups[group]:
            del self._bytes_of_groups[group]

    def _totals_with(self, namespace: str) -> tuple[Totals, Totals]:
        return self._totals[None], self._totals[namespace]

    def _refer(self, node: Node, unclaimed: set[SegmentId]) -> None:
        for segment_id in node.pieces.segment_ids:
            if segment_id in unclaimed:
                unclaimed.discard(segment_id)  # the first reference needs no entry
            else:
                self._references[segment_id] = self._references.get(segment_id, 1) + 1

    def _release(self, node: Node) -> None:
        for segment_id in node.pieces.segment_ids:
            count = self._references.pop(segment_id, 1) - 1
            if count > 1:
                self._references[segment_id] = count
