"""
What loads and saves ask of a GPU: every call of torch.cuda, Triton and the driver that they need.

    load    host memory --up--> staging --check, scatter--> vLLM's caches
    save    vLLM's caches --gather--> staging, sums --down--> host memory
    blocks  vLLM's caches --copy_blocks--> vLLM's caches

Each arrow is a stream of its own. A call only launches work and returns at once; the GPU does the work of one
stream in order. Events tell what is finished. `cuda.py` is a real GPU; a simulated one has the same calls and
no bytes. So only these calls may look at values in the GPU's memory or in the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from delta_tree import Span

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.block_rows import BlockCopy
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.staged_layers import StagedLayers
    from kvshare.vllm_connector.worker.staged_load import StagedLoad

Event = Any  # a point in the order of a stream's work
BegunLoad = Any  # what a GPU keeps of a load between its batches


class Stream(Enum):
    """The streams: each does its work in order; different ones may work at the same time."""

    VLLM = "vllm"  # the current stream of vLLM's thread: its steps, and passes over placeholders
    UP = "up"
    WRITE = "write"
    BLOCKS = "blocks"
    GATHER = "gather"
    DOWN = "down"


class Gpu(Protocol):
    """
    Any thread records and reads events. Only the thread that copies launches work.

    A batch is layers of segments that lie in a staging buffer together.
    """

    def register(self, buffer: torch.Tensor) -> None:
        """Prepare host memory (the arena) for copies for which the host does not wait."""

    def enter_thread(self) -> None:
        """Select this GPU for a thread that launches work, which calls this first: a new thread has GPU 0."""

    def simplify(self) -> bool:
        """Work without our own kernels from now on, in more launches. Returns whether anything changes."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate a staging buffer on the device, (bytes,) uint8. Called at the start only."""

    def record(self, stream: Stream) -> Event:
        """Record an event at the current end of a stream's work."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let the stream do later work after the event. The host does not wait."""

    def is_past(self, event: Event) -> bool:
        """Return whether the GPU has done all work before the event."""

    def seconds(self, begin: Event, end: Event) -> float | None:
        """Return the seconds between two events; None while the GPU is not past the second one."""

    def read(self, result: torch.Tensor) -> torch.Tensor:
        """
        Copy a result to host memory, in stream VLLM and by vLLM's thread.

        The copy may be read when an event that was recorded in the stream after this call is past.
        """

    def up(self, batch: Sequence[StagedLayers], staging: torch.Tensor) -> None:
        """Copy the batch into staging, in one call, in stream UP."""

    def begin_load(self, cache: PagedCache, load: StagedLoad) -> BegunLoad:
        """
        Prepare what the batches of a load share, before them, in stream WRITE.

        Raises ValueError if a copy moves and the movement of a layer is not known.
        """

    def check(self, cache: PagedCache, begun: BegunLoad, number: int, staging: torch.Tensor) -> None:
        """Add up all pieces of a batch in staging, in stream WRITE."""

    def scatter(self, cache: PagedCache, begun: BegunLoad, number: int, staging: torch.Tensor) -> None:
        """
        Write the rows of a batch into the caches of its layers, rotated to their new positions, in stream
        WRITE and after `check`.
        """

    def compare(self, begun: BegunLoad) -> torch.Tensor:
        """
        Compare all sums with the stored ones, in stream WRITE and after the last batch.

        Shapes:  -> (P,) bool in host memory, True where they differ, in the order of `StagedLoad.sums`. It
                 may be read when an event that was recorded in the stream after this call is past
        """

    def copy_blocks(self, cache: PagedCache, copies: Sequence[BlockCopy]) -> None:
        """
        Copy rows from blocks to others in all layers, rotated to their new positions, in stream BLOCKS.

        Raises ValueError as `begin_load`.
        """

    def gather(
        self,
        cache: PagedCache,
        staging: torch.Tensor,
        block_ids: Sequence[int],
        batch: Sequence[tuple[StagedLayers, Span]],
    ) -> None:
        """Copy the rows of spans into staging, at the offsets of the batch, in stream GATHER."""

    def sums(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> torch.Tensor:
        """
        Compute the sums of all pieces in staging (`kv/sums.py`), in stream GATHER.

        Shapes:  -> (P,) int64 in host memory, ordered as `StagedLayers.sums`; when to read: see `compare`
        """

    def down(self, staging: torch.Tensor, batch: Sequence[StagedLayers]) -> None:
        """Copy the batch from staging to where it is stored, in one call, in stream DOWN."""
