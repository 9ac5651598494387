"""
The part of the self-test that copies inside vLLM's cache: rows arrive in their slots, rotated if they move.

    [ rows ............ ][ copy of some, as they are ][ copy of others, moved ]

If it fails, copies come from host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from delta_tree import Span
from kvshare.kv.layout import Plane
from kvshare.vllm_connector.worker.block_rows import BlockCopy
from kvshare.vllm_connector.worker.cache_dtype import has_same_bits
from kvshare.vllm_connector.worker.copy_test import make, wrongly_moved
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.paged_cache import PagedCache

_ROWS = 24  # tokens, in the first blocks
_STAY, _MOVED = Span(1, 12), Span(9, 23)  # the rows that are copied: as they are, and moved
_SHIFT = 3


class BlockCopyTest:
    """A test of copies between blocks. It overwrites blocks."""

    def __init__(self, cache: PagedCache, device: Device, *, block_ids: Sequence[int]) -> None:
        """`block_ids`: free blocks with room for all rows and their copies."""
        self._cache, self._device = cache, device
        self._block_ids = tuple(block_ids)
        self._is_moving = cache.kv_layout.can_move
        spans = [_STAY, _MOVED] if self._is_moving else [_STAY]
        self._end = _ROWS + sum(map(len, spans))

    def check(self) -> str | None:
        """Return what is wrong, or None."""
        generator, layout = torch.Generator().manual_seed(11), self._cache.kv_layout
        shapes = [plane.shape(self._end) for plane in layout.planes]
        rows = [torch.randn(shape, generator=generator).to(layout.dtype) for shape in shapes]
        slots = self._cache.slots(self._block_ids, Span(0, self._end))
        k, v = (plane.to(layout.device) for plane in rows)
        self._cache.write(k, v, slots)
        try:
            make(self._device.copy_blocks(self._cache, self._copies, mark=self._device.mark()))
        except Exception as exc:  # noqa: BLE001  copies from host memory may work
            return f"copying raised an error: {type(exc).__name__}: {exc}"
        found = self._cache.read(self._block_ids, Span(0, self._end))
        planes = zip(layout.planes, rows, found.planes, strict=True)
        problems = (self._problem(plane, before, after) for plane, before, after in planes)
        return next((problem for problem in problems if problem is not None), None)

    def _copies(self) -> list[BlockCopy]:
        copies = [self._copy(_STAY, 0, _ROWS)]
        return [*copies, self._copy(_MOVED, _SHIFT, _ROWS + len(_STAY))] if self._is_moving else copies

    def _copy(self, source: Span, shift: int, target: int) -> BlockCopy:
        slots = self._cache.slot_numbers(self._block_ids, Span(target, target + len(source)))
        return BlockCopy(self._block_ids, source, shift, slots)

    def _problem(self, plane: Plane, before: torch.Tensor, after: torch.Tensor) -> str | None:
        """Shapes:  before, after (L, T, H, D)"""
        first, second = _ROWS, _ROWS + len(_STAY)
        if not has_same_bits(after[:, :first], before[:, :first]):
            return "a copy writes to slots that are not its own"
        if not has_same_bits(after[:, first:second], before[:, _STAY.start : _STAY.end]):
            return "copied rows are not those of their blocks"
        if self._is_moving:
            return wrongly_moved(after[:, second:], plane.moved(before[:, _MOVED.start : _MOVED.end], _SHIFT))
        return None
