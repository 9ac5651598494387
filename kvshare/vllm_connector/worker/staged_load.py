"""
A load in batches: which rows each batch copies, and which sums its pieces must have.

    copies    0, 1, 2 ..                from segments; a copy has a part in every batch that has its segment
    pieces    [batch 0][batch 1] ..     in the order in which they are added up: batch, segment, head, layer
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from delta_tree import SegmentId
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.kernel_tables import StagedPart
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_connector.worker.staged_layers import StagedLayers, batches_by_layer


class StagedLoad:
    """A load through staging buffers of `buffer_bytes`."""

    def __init__(self, copies: Sequence[RowCopy], buffer_bytes: int) -> None:
        """Raises ValueError if one layer of a segment is larger than a buffer."""
        self.copies = copies
        self._numbers: dict[Stored, list[int]] = {}  # of copies, by segment
        for number, copy in enumerate(copies):
            self._numbers.setdefault(copy.stored, []).append(number)
        self.batches = batches_by_layer(list(self._numbers), buffer_bytes) if copies else []
        counts = [sum(_num_pieces(part) for part in batch) for batch in self.batches]
        self._first_piece: list[int] = [0, *accumulate(counts)]

    @property
    def num_pieces(self) -> int:
        return self._first_piece[-1]

    def pieces(self, number: int) -> slice:
        """Return the numbers of a batch's pieces among all pieces."""
        return slice(self._first_piece[number], self._first_piece[number + 1])

    def sums(self) -> NDArray[np.int64]:
        """Return the stored sums of all pieces."""
        return np.concatenate([part.sums() for batch in self.batches for part in batch])

    def parts(self, number: int) -> dict[int, StagedPart]:
        """Return the parts in a batch, by the number of their copy."""
        return {copy: layers.part for layers in self.batches[number] for copy in self._numbers[layers.stored]}

    def pairs(self, number: int) -> list[tuple[StagedLayers, RowCopy]]:
        """Return the parts in a batch, as pairs of layers and copy."""
        return [
            (layers, self.copies[copy])
            for layers in self.batches[number]
            for copy in self._numbers[layers.stored]
        ]

    def damaged(self, differing: NDArray[np.bool_]) -> set[SegmentId]:
        """Return the segments with a piece whose sum differs. Shapes:  differing (all pieces,)"""
        segment_ids, first = set(), 0
        for batch in self.batches:
            for part in batch:
                after = first + _num_pieces(part)
                if differing[first:after].any():
                    segment_ids.add(part.stored.segment_id)
                first = after
        return segment_ids


def _num_pieces(part: StagedLayers) -> int:
    return part.stored.num_heads * len(part.layers)
