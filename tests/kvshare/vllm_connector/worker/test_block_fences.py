"""After which mark of vLLM's stream a load may write its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare.vllm_connector.worker.block_fences import BlockFences
from kvshare.vllm_connector.worker.device import Device


class CountedMarks(Device):
    """Marks are numbers; the device has reached all below `reached`."""

    def __init__(self) -> None:
        self.num_marks = self.reached = 0

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks - 1

    def is_past(self, mark: Any) -> bool:
        return bool(mark < self.reached)


@pytest.mark.parametrize(
    ("reached", "block_ids", "mark"),
    [
        (0, [9], 0),  # that of the start
        (0, [1], 1),
        (0, [2], 2),
        (0, [1, 2, 9], 2),
        (2, [1], 0),
        (2, [2, 1], 2),
        (3, [1, 2], 0),
    ],
)
def test_a_load_waits_for_what_uses_its_blocks_only(reached: int, block_ids: list[int], mark: int) -> None:
    """For the newest of it that the device has not done yet."""
    device = CountedMarks()
    fences = BlockFences(device)
    assert fences.mark_for([1]) == 0
    fences.add([1, 2])
    fences.add([2, 3])
    device.reached = reached
    assert fences.mark_for(block_ids) == mark


def test_nothing_is_kept_of_what_is_past() -> None:
    """A server computes placeholders for as long as it runs."""
    device = CountedMarks()
    fences = BlockFences(device)
    for number in range(100):
        fences.add([number, number + 1])
        device.reached = device.num_marks
    fences.mark_for([])
    assert not fences._fences
    assert not fences._of_block


def test_with_late_drafts_each_load_waits_for_all_that_was_launched() -> None:
    """vLLM may have given its blocks away, and those of its donors are read, while drafts are computed."""
    device = CountedMarks()
    fences = BlockFences(device, drafts_late=True)
    device.reached = device.num_marks
    for _ in range(2):
        before = device.num_marks
        assert fences.mark_for([9]) >= before
