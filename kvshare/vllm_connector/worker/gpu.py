"""
What loads and saves ask of a GPU: every call of torch.cuda, Triton and the driver that they need.

    load    host memory --up--> staging --check, scatter--> vLLM's caches
    save    vLLM's caches --gather--> staging, sums --down--> host memory

Each arrow is a stream of its own. A call returns at once: it asks for work, which the GPU does after all that
the same stream was asked for before. What is done is known by events. `cuda.py` is a real GPU; a simulated one
has the same calls and no bytes, so nothing but these calls may look at a value in its memory or in the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.kernel_tables import StagedCopy, StagedPart
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

Event = Any  # a point in the order of a stream's work


class Stream(Enum):
    """Orders of work. What is in different ones may be done at the same time."""

    VLLM = "vllm"  # vLLM's own steps, and passes over placeholders
    UP = "up"
    WRITE = "write"
    GATHER = "gather"
    DOWN = "down"


class Gpu(Protocol):
    """
    Events may be recorded and read by any thread. All else is called by the thread that copies.

    `rows` are contiguous parts of the arena; `parts` say which pieces they are and where they lie in a staging
    buffer, one after the other in the same order.
    """

    def register(self, buffer: torch.Tensor) -> None:
        """Prepare host memory, the arena, for copies that the host does not wait for."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A staging buffer on the device, (bytes,) uint8. Called at the start only."""

    def record(self, stream: Stream) -> Event:
        """The current end of a stream's work."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is asked for from now on is done after the event. The host does not wait."""

    def is_past(self, event: Event) -> bool:
        """Whether the GPU has done all work before the event."""

    def synchronize(self, event: Event) -> None:
        """The host waits until the GPU is past the event. Other threads of Python may run meanwhile."""

    def seconds(self, begin: Event, end: Event) -> float | None:
        """Between two events of a stream; None while the GPU is not past the second one."""

    def up(self, rows: Sequence[torch.Tensor], staging: torch.Tensor, parts: Sequence[StagedPart]) -> None:
        """In stream UP: copy rows into staging, with one call for all."""

    def check(
        self,
        staging: torch.Tensor,
        parts: Sequence[StagedPart],
        expected: NDArray[np.int64],
        *,
        row_bytes: int,
    ) -> torch.Tensor:
        """
        In stream WRITE: compare the sum of each piece with the one that is expected, see `kv/sums.py`.

        Shapes:  expected (P,) by part and piece -> (P,) bool in host memory: True where they differ. It may be
                 read when an event that was recorded in the stream after this call is past
        """

    def scatter(self, cache: PagedCache, staging: torch.Tensor, copies: Sequence[StagedCopy]) -> None:
        """In stream WRITE: write rows into all layers' caches, rotated to their new positions."""

    def gather(self, cache: PagedCache, staging: torch.Tensor, copies: Sequence[StagedCopy]) -> None:
        """In stream GATHER: copy rows of all layers into staging, in the order of extents."""

    def sums(self, staging: torch.Tensor, parts: Sequence[StagedPart], *, row_bytes: int) -> torch.Tensor:
        """
        In stream GATHER: the sum of each piece, see `kv/sums.py`.

        Shapes:  -> (P,) int64 in host memory, to be read as that of `check`
        Units:   row_bytes of a token's K in one piece
        """

    def down(self, staging: torch.Tensor, parts: Sequence[StagedPart], rows: Sequence[torch.Tensor]) -> None:
        """In stream DOWN: copy staging into rows, with one call for all."""
