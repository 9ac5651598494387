"""
The part of the self-test that saves and loads: what comes back is what was there, bit for bit.

It uses the same copies and kernels as every request on this machine. On a GPU, kernels are compiled here, so
that the first request does not wait for that.

    rows --save--> a segment: its rows and sums        --load, some of it moved--> the same blocks, emptied
    a sum of the segment is changed                    --load--> the damage is noticed
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import SegmentId, Span
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.sums import sums
from kvshare.vllm_connector.worker.cache_dtype import EIGHT_BITS, has_same_bits, steps_apart
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.copying import Work
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored

_SEGMENT = SegmentId(1)
_NUM_TOKENS = 40  # not a multiple of a block
_STAY, _MOVED = Span(1, 19), Span(23, 40)  # the tokens that are loaded: at their position, and moved
_SHIFT = 3
_POLL_S = 0.0005
_ROUNDINGS = 8  # rows may differ by so many times the epsilon of their dtype
_ROUNDED_OTHERWISE = 0.01  # share of 8-bit numbers that may differ, by one step


class CopyTest:
    """A test of saves and loads. It overwrites blocks, and leaves the store as it was."""

    def __init__(
        self,
        cache: PagedCache,
        store: SegmentStore,
        device: Device,
        *,
        block_ids: Sequence[int],
        part: int = 0,
    ) -> None:
        """
        `block_ids`: free blocks with room for `_NUM_TOKENS` tokens and a few more. `part`: the number of the
        part of segments that has the layers of `cache`.
        """
        self._cache, self._store, self._device, self._part = cache, store, device, part
        self._block_ids = block_ids
        generator, layout = torch.Generator().manual_seed(5), cache.kv_layout
        shapes = (plane.shape(_NUM_TOKENS) for plane in layout.planes)
        k, v = (torch.randn(shape, generator=generator).to(layout.dtype) for shape in shapes)
        self._rows = SegmentKV((k, v))

    def check(self) -> str | None:
        """Return what does not come back as it was, or None."""
        try:
            stored = self._store.add(_SEGMENT, _NUM_TOKENS).parts[self._part]
        except MemoryError as exc:
            return f"the store has no room for {_NUM_TOKENS} tokens: {exc}"
        try:
            return self._check_save(stored) or self._check_load(stored)
        except Exception as exc:  # noqa: BLE001  another way of copying may work
            return f"copying raised an error: {type(exc).__name__}: {exc}"
        finally:
            self._store.drop([_SEGMENT])

    def _check_save(self, stored: Stored) -> str | None:
        self._write(self._rows)
        save = self._device.save(
            self._cache, self._block_ids, [(stored, Span(0, _NUM_TOKENS))], mark=self._device.mark()
        )
        make(save)
        planes = (plane.permute(2, 0, 1, 3) for plane in self._rows.planes)  # (H, L, T, D)
        if not has_same_bits(stored.rows, torch.stack(list(planes), dim=2)):
            return "saved rows are not those of the cache"
        expected = sums(stored.rows.flatten(2), row_bytes=stored.row_bytes).numpy()
        if stored.sums is None or (stored.sums != expected).any():
            return "the sums of saved rows are wrong"
        return None

    def _check_load(self, stored: Stored) -> str | None:
        can_move = self._cache.kv_layout.can_move
        if self._load(stored, can_move=can_move):
            return "a segment as it was saved is taken for a damaged one"
        found = self._cache.read(self._block_ids, Span(0, _NUM_TOKENS + _SHIFT))
        planes = zip(self._cache.kv_layout.planes, self._rows.planes, found.planes, strict=True)
        for plane, rows, there in planes:
            if not has_same_bits(there[:, _STAY.start : _STAY.end], rows[:, _STAY.start : _STAY.end]):
                return "loaded rows are not those that were saved"
            if can_move:
                moved = plane.moved(rows[:, _MOVED.start : _MOVED.end], _SHIFT)
                begin, end = _MOVED.start + _SHIFT, _MOVED.end + _SHIFT
                if problem := wrongly_moved(there[:, begin:end], moved):
                    return problem
            elsewhere = (there[:, : _STAY.start], there[:, _STAY.end : _MOVED.start + _SHIFT])
            if any(bool((part != 0).any()) for part in elsewhere):
                return "a load writes to slots that are not its own"
        # As if a bit of a row had flipped. The row itself is not changed: another rank may be reading it.
        assert stored.sums is not None, "it was just compared"
        stored.sums[-1, -1] ^= 1
        if not self._load(stored, can_move=False):
            return "a damaged segment is not noticed"
        return None

    def _load(self, stored: Stored, *, can_move: bool) -> bool:
        """Load the segment into emptied slots. Returns whether it was found damaged."""
        self._write(SegmentKV(tuple(torch.zeros_like(rows) for rows in self._rows.planes)))
        spans = [(_STAY, 0), (_MOVED, _SHIFT)] if can_move else [(_STAY, 0)]
        copies = [
            RowCopy(stored, span, shift, self._slots(Span(span.start + shift, span.end + shift)))
            for span, shift in spans
        ]
        load = self._device.load(self._cache, lambda: copies, mark=self._device.mark())
        make(load)
        return _SEGMENT in load.damaged

    def _slots(self, span: Span) -> NDArray[np.int64]:
        return self._cache.slot_numbers(self._block_ids, span)

    def _write(self, rows: SegmentKV) -> None:
        k, v = (plane.to(self._cache.kv_layout.device) for plane in rows.planes)
        self._cache.write(k, v, self._cache.slots(self._block_ids, Span(0, k.shape[1])))


def wrongly_moved(there: torch.Tensor, moved: torch.Tensor) -> str | None:
    """Return what is wrong with rows that were moved to other slots; None if they differ by rounding only."""
    if there.dtype in EIGHT_BITS:
        steps = steps_apart(there, moved)
        share = float((steps > 0).float().mean())
        if int(steps.max()) > 1 or share > _ROUNDED_OTHERWISE:
            return f"{share:.0%} of the numbers that were moved are off by up to {int(steps.max())} steps"
        return None
    error = float((there.float() - moved.float()).abs().max() / moved.float().abs().max())
    if not error <= _ROUNDINGS * torch.finfo(there.dtype).eps:
        return f"rows that were moved are off by {error:.2g} of the largest"
    return None


def make(work: Work) -> None:
    """Do all of this work, and wait until it is finished."""
    for _ in work.batches():
        while not work.has_room:
            time.sleep(_POLL_S)
    while not work.is_past:
        time.sleep(_POLL_S)
    work.finish()
