"""
Part of the self-test: how rows of this model move to other positions; see `kvshare.kv.movement`.

Alphabet: L layers, T tokens, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from delta_tree import Span
from kvshare.kv.movement import Observed, Verification, find_movement
from kvshare.kv.sequence import SegmentKV
from kvshare.vllm_connector.worker.computed_rows import ComputedRows
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.runs import Run

FEW_TOKENS = 48  # enough if the length does not matter
FIRST_BLOCK = 1  # vLLM reserves block 0; the others are free until the first request
SHIFTS = (37, 133)
FIRST_PLACE = 1  # of the tokens: a layer that drafts (MTP) does not see the word at position 0
_FIRST_PASS = 17  # tokens, where rows are computed in two passes
_NOISE = 3.0  # moved rows may differ by so many times what two passes differ by from one

Found = list[tuple[Verification, Verification]]  # of K and V of each layer


class MovementTest:
    """
    Computes a few tokens at several positions, `shift` after FIRST_PLACE. All ranks must call the same
    methods in the same order.

    Rows are computed together, as one prompt, or alone: each token is a sequence of its own and attends only
    to itself, with a weight of 1, so that what attention rounds does not change later layers.
    """

    def __init__(
        self,
        cache: PagedCache,
        forward: PartialForward,
        *,
        tokens: Sequence[int],
        block_ids: Sequence[int],
        tolerance: float,
    ) -> None:
        self._cache = cache
        self._forward = forward
        self._tokens, self._block_ids = tuple(tokens), tuple(block_ids)
        self._tolerance = tolerance

    def movements(self, tables: Sequence[torch.Tensor]) -> Found:
        """
        Find which of these tables, if any, rotates each layer's K and V to other positions.

        If the cache is quantised, rows are those before that, computed alone: errors of keys would add up.
        """
        rows_at = self._rows_alone if self._cache.is_quantised else self._rows_together
        return self._found(tables, {shift: rows_at(shift) for shift in (0, *SHIFTS)})

    def movements_despite_rounding(self, tables: Sequence[torch.Tensor], so_far: Found) -> Found:
        """
        Complete what `movements` has found, for kernels that round differently at other positions.

        vLLM's attention with AMX does so in bfloat16, and some layers amplify it. There the movement is found
        on rows that are computed alone. Rows that are computed together and moved like that may deviate by
        some times as much as the same rows do, at the same place, when they are computed in two passes.
        """
        if self._cache.is_quantised:
            return so_far
        together = {shift: self._rows_together(shift) for shift in (0, *SHIFTS)}
        in_two_passes = self._rows_together(0, first=_FIRST_PASS)
        alone = self._found(tables, {shift: self._rows_alone(shift) for shift in (0, *SHIFTS)})

        def chosen(layer: int, name: int) -> Verification:
            usual, other = so_far[layer][name], alone[layer][name]
            if usual.movement is not None or other.movement is None:
                return usual
            (same,) = self._observed({0: together[0], 1: in_two_passes}, layer, name)
            noise = same.error_of(same.here)
            error = max(
                pair.error_of(other.movement.moved(pair.here, pair.shift))
                for pair in self._observed(together, layer, name)
            )
            is_rounding = error <= max(self._tolerance, _NOISE * noise)
            return Verification(other.movement, error, other.control) if is_rounding else usual

        return [(chosen(layer, 0), chosen(layer, 1)) for layer in range(len(so_far))]

    def _found(self, tables: Sequence[torch.Tensor], rows: Mapping[int, SegmentKV]) -> Found:
        def verification(layer: int, name: int) -> Verification:
            observed = list(self._observed(rows, layer, name))
            return find_movement(tables, observed, tolerance=self._tolerance)

        layers = range(self._cache.kv_layout.num_layers)
        return [(verification(layer, 0), verification(layer, 1)) for layer in layers]

    def _observed(self, rows: Mapping[int, SegmentKV], layer: int, name: int) -> Iterator[Observed]:
        """Yield the K (0) or V (1) of a layer at shift 0 with those at each other shift."""
        of_layer = {
            shift: self._cache.kv_layout.of_layer(each.planes, layer)[name] for shift, each in rows.items()
        }
        here = of_layer.pop(0)
        for shift, there in of_layer.items():
            yield Observed(here, there, shift)

    def _rows_together(self, shift: int, *, first: int | None = None) -> SegmentKV:
        """
        Return the rows of the tokens as one prompt, for positions that are `shift` higher. `first`: how many
        tokens are computed in a pass before the others.
        """
        ends = [len(self._tokens)] if first is None else [first, len(self._tokens)]
        for start, end in zip([0, *ends], ends, strict=False):
            self._forward.compute([Run(self._block_ids, Span(start, end), self._tokens, FIRST_PLACE + shift)])
        return self._cache.read(self._block_ids, Span(0, len(self._tokens)))

    def _rows_alone(self, shift: int) -> SegmentKV:
        """Return the rows of tokens that are sequences of their own, before they are quantised."""
        blocks = range(FIRST_BLOCK, min(self._cache.num_blocks, FIRST_BLOCK + len(self._tokens)))
        runs = [
            Run((block,), Span(0, 1), self._tokens[place:], FIRST_PLACE + shift)
            for place, block in enumerate(blocks)
        ]
        if self._cache.is_quantised:
            computed = ComputedRows(self._cache)
            with computed.recorded():
                self._forward.compute(runs)
            return computed.read()
        self._forward.compute(runs)
        each = [self._cache.read((block,), Span(0, 1)).planes for block in blocks]
        return SegmentKV(tuple(torch.cat(rows, dim=1) for rows in zip(*each, strict=True)))
