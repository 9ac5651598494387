"""Opens the tree and the tiers of a server, with the KV that the last process has left on disk."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from delta_tree import DeltaTree, Segment, SegmentId
from kvshare.embedded.shared_prompts import SharedPrompts
from kvshare.kv.layout import KVLayout
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.tier import MemoryTier
from kvshare.metadata import open_emptied_tree, open_stored_tree
from kvshare.runtime import Forgotten
from kvshare.settings import SharedTierSettings, StoreSettings
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.tiers import KV_FOLDER
from kvshare.tiers.disk_and_shared import DiskAndShared
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import ObjectForm
from kvshare.tiers.lower_tier import LowerTier
from kvshare.tiers.near_memory import queue_of_segments
from kvshare.tiers.shared_prompts import PromptExchange
from kvshare.tiers.shared_start import open_shared_tier
from kvshare.tiers.shared_tier import SharedTier
from kvshare.tiers.tier_stack import TierStack

log = logging.getLogger(__name__)


class StoredKV:
    """
    The store of one model. `open_tree` and `new_keeper` block, and are called once, in this order.

    `parts`: everything besides the layout on which KV depends. KV stored with other parts is deleted.
    """

    def __init__(
        self,
        settings: StoreSettings,
        layout: KVLayout | None,
        *,
        min_tokens: int,
        identity: str,
        parts: Sequence[str],
        files: Files | None = None,
        shared_tier: SharedTierSettings | None = None,
    ) -> None:
        """
        `layout`: None if nothing is shared. `min_tokens`: the least length of a stored prompt.

        Raises:  ConfigError, MissingExtraError if the shared store cannot be used as it is configured
        """
        self._files = files
        self._settings, self._layout, self._min_tokens = settings, layout, min_tokens
        self.identity, self._parts = identity, parts
        self._disk: DiskTier | None = None
        self._stack: TierStack | None = None  # memory over the disk or the shared store
        self._problem: str | None = None  # why the disk could not be opened
        self.shared_prompts: SharedPrompts | None = None  # once there is a keeper
        self._shared: SharedTier | None = None
        if layout is not None and shared_tier is not None and shared_tier.url is not None:
            self._shared = open_shared_tier(shared_tier, ObjectForm.of(layout, parts))

    @property
    def reads_below(self) -> bool:
        return self._uses_disk or (self._layout is not None and self._shared is not None)

    @property
    def _uses_disk(self) -> bool:
        return (
            self._layout is not None and self._settings.path is not None and self._settings.max_disk_bytes > 0
        )

    def open_tree(self) -> tuple[DeltaTree, Forgotten]:
        """
        Open the tree with the prompts whose KV is on disk. Returns it, and the prompts that were forgotten.

        Raises:  StoreError if another process has the store open
        """
        folder = self._settings.path
        if folder is None or not self._uses_disk:
            return open_emptied_tree(folder, identity=self.identity)
        disk = self._disk = self._disk_in(folder)

        def whole(segments: Iterable[Segment]) -> Container[SegmentId]:
            try:
                disk.open()
            except OSError as exc:
                log.warning(
                    "KV stays in memory: %s cannot be used: %s; it is tried again", KV_FOLDER, exc.strerror
                )
                self._problem = exc.strerror or type(exc).__name__
                return frozenset()
            return disk.whole(segments)

        tree, forgotten = open_stored_tree(
            folder, identity=self.identity, whole=whole, min_tokens=self._min_tokens
        )
        if tree.identity is None:  # the tree could not be written: nothing would refer to KV on disk
            self._disk, self._problem = self._disk_in(folder), "the store cannot be written"
        elif disk.is_open:
            disk.adopt(tree.segments())
        return tree, forgotten

    def recover(self, tree: DeltaTree) -> None:
        """Open the disk, if it could not be opened before and can be now. In the writer's thread; blocks."""
        disk = self._disk
        if disk is None or disk.is_open or tree.identity is None:
            return
        with suppress(OSError):
            disk.open_late(tree.segments())
            if self._stack is not None:
                self._stack.note_open()

    def new_keeper(self, tree: DeltaTree) -> MemoryKeeper[SegmentKV]:
        """Make a keeper over memory, and over the disk and the shared store if they are configured."""
        kv_bytes, rate = self._settings.kv_bytes, self._settings.disk_write_bytes_per_s
        below: LowerTier | None = self._shared if self._disk is None else self._disk
        if below is None:
            return MemoryKeeper(tree, MemoryTier(kv_bytes), min_tokens=self._min_tokens)
        if self._disk is not None and self._shared is not None:
            below = DiskAndShared(self._disk, self._shared)
        queue = queue_of_segments(self._settings.eviction)
        stack = self._stack = TierStack(
            kv_bytes, below, write_bytes_per_s=rate, problem=self._problem, queue=queue
        )
        keeper = MemoryKeeper(tree, stack, min_tokens=self._min_tokens)
        if self._shared is not None:
            exchange = PromptExchange(self._shared.store)
            self.shared_prompts = SharedPrompts(exchange, self._shared, keeper, below=below)
        return keeper

    def _disk_in(self, folder: str) -> DiskTier:
        assert self._layout is not None, "KV of a model that is not shared is not stored"
        return DiskTier(
            Path(folder) / KV_FOLDER,
            ObjectForm.of(self._layout, self._parts),
            max_bytes=self._settings.max_disk_bytes,
            keep_free_bytes=self._settings.disk_keep_free_bytes,
            files=self._files,
        )
