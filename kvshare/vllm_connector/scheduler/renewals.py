"""
Keeps the blocks of donors from being given away while requests wait that are about to copy from them.

A request that finds no other one waiting is admitted in the step that is planned next, and its load pins
what it copies from. Until then only its own blocks, and a few of running requests, are allocated: so only
donors among the next blocks that vLLM gives away are renewed. If it still waits after that step, all are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from delta_tree import SegmentId
from kvshare.vllm_connector.scheduler.block_donors import BlockDonors
from kvshare.vllm_connector.scheduler.waiting import Waiting

_MARGIN = 64  # blocks that running requests may be given in a step


@dataclass(eq=False)
class Renewals:
    """One per scheduler."""

    donors: BlockDonors
    waiting: Waiting
    _later: dict[str, Collection[SegmentId]] = field(default_factory=dict)  # by request

    def arrive(self, request_id: str, segment_ids: Collection[SegmentId], *, num_tokens: int) -> None:
        """Note a request of `num_tokens`, which waits now and is about to copy from segments."""
        if not segment_ids:
            return
        if not self.waiting.is_only_one_for_blocks(request_id):
            self.donors.renew(segment_ids)
            return
        self.donors.renew(segment_ids, before=self.donors.blocks_of(num_tokens) + _MARGIN)
        self._later[request_id] = segment_ids

    def end_step(self) -> None:
        """Renew all donors of requests that the step now planned has not admitted."""
        later, self._later = self._later, {}
        for request_id, segment_ids in later.items():
            if self.waiting.is_waiting_for_blocks(request_id):
                self.donors.renew(segment_ids)
