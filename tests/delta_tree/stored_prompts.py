"""Random prompts, stored as a tree stores them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from delta_tree import (
    Composition,
    Node,
    NodeId,
    Piece,
    PieceTable,
    Segment,
    SegmentId,
    UnknownSegmentError,
    compose,
    token_ids,
)
from tests.delta_tree.fake_prompts import NAMESPACE, segment


@dataclass
class StoredPrompts:
    """Stored prompts, and which token each stored position holds."""

    nodes: list[Node] = field(default_factory=list)
    segments: dict[SegmentId, Segment] = field(default_factory=dict)
    stored: dict[tuple[SegmentId, int], int] = field(default_factory=dict)

    def add(self, ids: Sequence[int], generations: Sequence[int] = (0,), namespace: str = NAMESPACE) -> Node:
        """A prompt cut into as many segments as there are generations."""
        cuts = np.linspace(0, len(ids), len(generations) + 1).astype(int).tolist()
        rows, exact_length, exact = [], 0, True
        for start, end, generation in zip(cuts[:-1], cuts[1:], generations, strict=True):
            if start == end:
                continue
            own = segment(
                end - start,
                namespace=namespace,
                first_position=start,
                generation=generation,
                segment_id=SegmentId(len(self.segments) + 1),
            )
            self.segments[own.segment_id] = own
            rows.append(Piece(own.segment_id, 0, end - start))
            self.stored.update({(own.segment_id, i): ids[start + i] for i in range(end - start)})
            exact = exact and generation == 0
            exact_length = end if exact else exact_length
        node = Node(
            node_id=NodeId(len(self.nodes) + 1),
            namespace=NAMESPACE,
            token_ids=token_ids(ids),
            pieces=PieceTable(rows),
            exact_length=exact_length,
            deviation=0.0,
            created_at=0.0,
            last_used_at=0.0,
            num_hits=0,
            pinned=False,
        )
        self.nodes.append(node)
        return node

    def segment_of(self, segment_id: SegmentId) -> Segment:
        """As the tree answers it."""
        if segment_id not in self.segments:
            raise UnknownSegmentError(segment_id)
        return self.segments[segment_id]

    def compose(
        self,
        target: Sequence[int],
        *,
        min_run: int = 16,
        max_donors: int = 4,
        max_generation: int = 9,
        allow_approximate: bool = True,
        may_move: bool = True,
    ) -> Composition:
        """The composition of `target` over all nodes, checked for what must always hold."""
        made = compose(
            token_ids(target),
            self.nodes,
            self.segment_of,
            min_run=min_run,
            max_donors=max_donors,
            max_generation=max_generation,
            allow_approximate=allow_approximate,
            may_move=may_move,
        )
        self.check(made, target, max_generation)
        return made

    def check(self, made: Composition, target: Sequence[int], max_generation: int) -> None:
        """Copies and gaps cover each position once; what is copied is equal and usable."""
        spans = sorted((*(copy.target for copy in made.copies), *made.gaps))
        assert [p for span in spans for p in range(span.start, span.end)] == [*range(len(target))]
        assert made.num_copied + sum(map(len, made.gaps)) == made.num_tokens == len(target)
        for copy in made.copies:
            own = self.segments[copy.segment_id]
            for i in range(copy.length):
                assert self.stored[copy.segment_id, copy.offset + i] == target[copy.target_start + i]
            assert copy.source_position == own.first_position + copy.offset
            donor = next(node for node in self.nodes if node.node_id == copy.donor)
            theirs = donor.token_ids[copy.donor_start : copy.donor_start + copy.length].tolist()
            assert theirs == list(target[copy.target.start : copy.target.end])
        for before, after in pairwise(made.copies):
            assert not after.continues(before) or after.target_start == made.exact_length
        for copy in made.copies:
            own = self.segments[copy.segment_id]
            assert own.generation <= max_generation
            if copy.target_start < made.exact_length:
                assert copy.target.end <= made.exact_length
                assert (copy.shift, own.generation) == (0, 0)
        for gap in made.gaps:
            assert gap.start >= made.exact_length
        used = {n.node_id for n, reason in zip(self.nodes, made.reasons, strict=True) if reason == "used"}
        assert used == set(made.donors)
