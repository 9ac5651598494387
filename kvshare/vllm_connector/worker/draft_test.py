"""
The part of the self-test for speculative decoding: what drafts has the rows here that vLLM itself computes.

vLLM's model runner computes a prompt. Then half of its rows are copies, and our passes compute the others:

    the runner   [ rows of the whole prompt ................................ ]
    copied       [ copy ]          [ copy ]          [ copy ]
    our passes          [ run     ]        [ run     ]        [ run           ]
    a head too         ^                  ^                  ^                     the last row of each copy

Rows that our passes compute at other positions are compared in `movement_test.py`, and copies of all layers
in `copy_test.py` and `block_copy_test.py`. So what a draft reads after a shared prefill is what it would read
after a full one, in the slots where this runner reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from delta_tree import Span
from kvshare.kv.sequence import SegmentKV
from kvshare.vllm_connector.worker.deviation import CLEARLY, ROUNDING, Expected
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.runner_prefill import RunnerPrefill
from kvshare.vllm_connector.worker.runs import Run

_COPY, _EVERY = 8, 16  # tokens of a copy; between the starts of two
_LEAST = 3 * _EVERY  # tokens of a prompt: with fewer the spread of a channel is not known
_UNWRITTEN = {"k": 3.0, "v": -3.0}  # rows that no model computes


class DraftTest:
    """A test of one drafting model or head. It overwrites blocks. All ranks call it together."""

    def __init__(
        self,
        cache: PagedCache,
        forward: PartialForward,
        prefill: RunnerPrefill,
        *,
        tokens: Sequence[int],
        block_ids: Sequence[int],
        num_target_layers: int,
        is_head: bool,
        tolerance: float,
    ) -> None:
        """`block_ids`: free ones for the `tokens`, of which as many are used as a step may have."""
        self._cache, self._forward, self._prefill = cache, forward, prefill
        room = len(block_ids) * cache.block_size - prefill.num_drafts
        self._length = min(len(tokens), prefill.max_tokens, room)
        self._tokens, self._block_ids = tuple(tokens[: self._length]), tuple(block_ids)
        self._layers = range(num_target_layers, cache.kv_layout.num_layers)
        self._is_head, self._tolerance = is_head, tolerance
        starts = range(0, self._length - _EVERY, _EVERY)
        self._copies = [Span(start, start + _COPY) for start in starts]
        ends = [*starts[1:], self._length]
        self._gaps = [Span(copy.end, end) for copy, end in zip(self._copies, ends, strict=True)]

    def check(self) -> str | None:
        """Return why rows of what drafts are not known to be right, or None."""
        if self._length < _LEAST:
            return f"a prompt of {_LEAST} tokens does not fit into a step and its blocks"
        nothing = self._cache.read(self._block_ids, Span(0, self._length))
        for plane, rows in zip(self._cache.kv_layout.planes, nothing.planes, strict=True):
            rows.fill_(_UNWRITTEN[plane.name])
        self._write(nothing)
        self._prefill.compute(self._tokens, self._block_ids)
        whole = self._cache.read(self._block_ids, Span(0, self._length))
        self._write(self._copied(whole, nothing))
        self._forward.compute(self._runs())
        got = self._cache.read(self._block_ids, Span(0, self._length))
        # The last token's row of a head has seen the token that was sampled.
        last = self._length - self._is_head
        computed = [place for gap in self._gaps for place in range(gap.start, min(gap.end, last))]
        problem = self._compared(whole, got, computed, "between copies")
        if problem is None and self._is_head:
            problem = self._compared(whole, got, [copy.end - 1 for copy in self._copies], "at ends of copies")
        return problem

    def _runs(self) -> list[Run]:
        """Return what our passes go over: the gaps, and for a head the last row of each copy."""
        if not self._is_head:
            return [Run(self._block_ids, gap, self._tokens) for gap in self._gaps]
        return [
            Run(self._block_ids, Span(gap.start - 1, gap.end), self._tokens, kept=(gap.start - 1,))
            for gap in self._gaps
        ]

    def _copied(self, whole: SegmentKV, nothing: SegmentKV) -> SegmentKV:
        """The rows of copies, and nothing elsewhere."""
        made, layout = SegmentKV(tuple(rows.clone() for rows in nothing.planes)), self._cache.kv_layout
        for layer in range(layout.num_layers):
            kept = int(self._is_head and layer in self._layers)  # rows at ends that the head computes
            both = zip(layout.of_layer(made.planes, layer), layout.of_layer(whole.planes, layer), strict=True)
            for there, rows in both:
                for copy in self._copies:
                    there[copy.start : copy.end - kept] = rows[copy.start : copy.end - kept]
        return made

    def _write(self, rows: SegmentKV) -> None:
        layout, slots = self._cache.kv_layout, self._cache.slots(self._block_ids, Span(0, self._length))
        there = [plane.to(layout.device) for plane in rows.planes]
        for layer in range(layout.num_layers):
            self._cache.write_layer(layer, *layout.of_layer(there, layer), slots)

    def _compared(self, whole: SegmentKV, got: SegmentKV, places: list[int], where: str) -> str | None:
        """Return what is wrong with rows of what drafts at these positions, or None."""
        device = self._cache.kv_layout.device
        right = self._rows(whole, places)
        expected = Expected(right, tolerance=self._tolerance, device=device)
        error = expected.deviation(self._rows(got, places))
        if not error <= self._tolerance:  # NaN is no error that is small
            return f"rows {where} are off by {error:.2g} (at most {self._tolerance:.2g} is rounding)"
        others = SegmentKV(tuple(plane.roll(1, dims=1) for plane in right.planes))
        if expected.deviation(others) < CLEARLY * max(error, ROUNDING * self._tolerance):
            return "rows of different tokens are too similar to detect errors"
        return None

    def _rows(self, rows: SegmentKV, places: list[int]) -> SegmentKV:
        """Return the rows of what drafts: K and V of each layer as (1, len(places), H, D)."""
        layout = self._cache.kv_layout
        each = (plane for layer in self._layers for plane in layout.of_layer(rows.planes, layer))
        return SegmentKV(tuple(plane.float()[places].to(plane.dtype)[None] for plane in each))
