"""
Estimates how long saves to host memory take, from the latest large saves.

While a save reads the blocks of an ended request, new requests cannot use these blocks. At 8 GB/s a save of
32,768 tokens takes half a second, and during that time half of a small pool of blocks may be missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvshare.vllm_connector.metadata import SaveRequest, WorkerReport
from kvshare.vllm_protocol.stages import SAVE

_LARGE = 128  # tokens; smaller saves take longer per token
_NEWEST = 0.25  # weight of the last save
_LONG_S = 0.1


class SavePace:
    """The pace of one scheduler's saves. Until a large save is measured, no save counts as long."""

    def __init__(self) -> None:
        self._token_s = 0.0
        self._under_way = Counter[str]()  # tokens, by the name of the save

    def begin(self, saves: Iterable[SaveRequest]) -> None:
        """Note saves that the workers are going to make."""
        for save in saves:
            if save.spans:
                self._under_way[save.request_id] += sum(len(span) for _, span in save.spans)

    def note(self, report: WorkerReport) -> None:
        """Learn from the saves that have ended."""
        for name, seconds in report.stage_seconds.items():
            if SAVE in seconds and (num_tokens := self._under_way.pop(name, 0)) >= _LARGE:
                token_s = seconds[SAVE] / num_tokens
                self._token_s += (token_s - self._token_s) * (_NEWEST if self._token_s else 1)
        for name in report.failed_saves:
            self._under_way.pop(name, None)

    def is_long(self, num_tokens: int) -> bool:
        """Return whether a save of so many tokens takes more than a tenth of a second."""
        return num_tokens * self._token_s > _LONG_S
