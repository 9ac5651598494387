"""
Blocks that are still in use on vLLM's stream when vLLM may give them to another request: blocks of passes
over placeholders, of which vLLM does not know, and of saves of preempted requests.

A load into such a block waits until the use is over. All other loads are written while the GPU computes.

Where vLLM counts a step as done before its drafts are computed (model runner V2), a block that is given away
or copied from may still be written, by a drafting pass. Each load waits for such passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from kvshare.vllm_connector.worker.device import Device


class _Fence(NamedTuple):
    number: int
    mark: Any
    block_ids: Collection[int]


class BlockFences:
    """Used by vLLM's thread. `drafts_late`: drafts are computed after vLLM counts their step as done."""

    def __init__(self, device: Device, *, drafts_late: bool = False) -> None:
        self._device, self._drafts_late = device, drafts_late
        self._fences: deque[_Fence] = deque()  # fences that are not past, the oldest first
        self._of_block: dict[int, _Fence] = {}  # the newest fence of each block
        self._start = device.mark()  # after the self-test

    def add(self, block_ids: Collection[int]) -> None:
        """Note that blocks are used by the work of vLLM's stream up to now."""
        self._forget_past()
        number = self._fences[-1].number + 1 if self._fences else 0
        fence = _Fence(number, self._device.mark(), block_ids)
        self._fences.append(fence)
        self._of_block.update(dict.fromkeys(block_ids, fence))

    def mark_for(self, block_ids: Iterable[int]) -> Any:
        """Return the mark after which these blocks may be written, and those of others copied."""
        if self._drafts_late:
            return self._device.mark()
        self._forget_past()
        known = [fence for block_id in block_ids if (fence := self._of_block.get(block_id)) is not None]
        return max(known, key=lambda fence: fence.number).mark if known else self._start

    def _forget_past(self) -> None:
        while self._fences and self._device.is_past(self._fences[0].mark):
            past = self._fences.popleft()
            for block_id in past.block_ids:
                if self._of_block.get(block_id) is past:
                    del self._of_block[block_id]
