"""
The store of the embedded engine without a model: tree, memory, disk and keeper, over KV made of tokens.

Each value is made of its token, its position and its layer, so that a wrong byte is seen wherever it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from delta_tree import DeltaTree, Node, NodeId, SegmentId, TokenIds, token_ids
from kvshare.embedded.stored_kv import StoredKV
from kvshare.kv.sequence import SegmentKV, SequenceKV
from kvshare.settings import load_settings
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.plan import NoPlan
from kvshare.tiers.files import Files
from kvshare.tiers.tier_stack import TierStack
from tests.kvshare.tiers.stored import LAYOUT, NAMESPACE

MIN_TOKENS = 16
SEGMENT_TOKENS = 16  # in so small a memory
SEGMENT_BYTES = SEGMENT_TOKENS * LAYOUT.bytes_per_token
PROMPT_TOKENS = 3 * SEGMENT_TOKENS
SETTINGS = load_settings().store


class SmallStore:
    """Opened at once; `close` stops it as a server does."""

    def __init__(
        self,
        folder: Path,
        *,
        memory: int = 12,
        disk: int = 24,
        parts: tuple[str, ...] = (),
        **settings: object,
    ) -> None:
        """`memory`, `disk`: how many segments each may hold."""
        files = settings.pop("files", None)
        assert files is None or isinstance(files, Files)
        given = {
            "path": str(folder),
            "kv_bytes": memory * SEGMENT_BYTES,
            "disk_bytes": disk * SEGMENT_BYTES,
            "disk_write_bytes_per_s": 10**12,
            "disk_keep_free_bytes": 0,
            **settings,
        }
        stored = StoredKV(
            SETTINGS.model_copy(update=given),
            LAYOUT,
            min_tokens=MIN_TOKENS,
            identity="model",
            parts=parts,
            files=files,
        )
        self.tree, self.forgotten = stored.open_tree()
        self.keeper: MemoryKeeper[SegmentKV] = stored.new_keeper(self.tree)

    @property
    def stack(self) -> TierStack:
        assert isinstance(self.keeper.tier, TierStack)
        return self.keeper.tier

    def store(self, number: int, num_tokens: int = PROMPT_TOKENS) -> Node | None:
        return self.keeper.store(computed(prompt(number, num_tokens)))

    def lengthen(self, node: Node, number: int, num_tokens: int) -> Node | None:
        """As the answer of a stored prompt is."""
        whole = computed(prompt(number, num_tokens))
        return self.keeper.complete(node, whole, num_prompt=node.num_tokens)

    def settle(self) -> None:
        """Until all is on disk, and what was evicted is not."""
        until = time.monotonic() + 120
        while self.stack.status()[1].num_due_bytes or not self.stack.below.is_swept:
            assert time.monotonic() < until, self.stack.status()
            time.sleep(0.0005)

    def close(self) -> None:
        self.keeper.close()
        self.tree.close()

    def safe(self) -> dict[NodeId, Node]:
        """Prompts of which all KV is on disk."""
        disk = self.stack.below
        nodes = {node.node_id: node for node in self.tree.nodes()}
        return {
            node_id: node
            for node_id, node in nodes.items()
            if all(entry in disk for entry in node.pieces.segment_ids)
        }


def prompt(number: int, num_tokens: int) -> TokenIds:
    return token_ids(np.random.default_rng(number).integers(1, 5000, 400)[:num_tokens])


def computed(tokens: TokenIds) -> Computed[SegmentKV]:
    kv = SequenceKV(LAYOUT, len(tokens))
    for plane, rows in zip(kv.planes, expected_rows(tokens, 0), strict=True):
        plane.copy_(rows)
    return Computed(NAMESPACE, tokens, NoPlan(), kv)


def expected_rows(tokens: TokenIds, first_position: int) -> list[torch.Tensor]:
    """(L, T, H, D) of each plane for these tokens from this position on."""
    positions = torch.arange(first_position, first_position + len(tokens))
    own = torch.from_numpy(np.array(tokens)) * 1000 + positions
    return [
        (own.view(1, -1, 1, 1) * 2 + torch.arange(2).view(-1, 1, 1, 1) + number)
        .float()
        .expand(plane.shape(len(tokens)))
        for number, plane in enumerate(LAYOUT.planes)
    ]


def wrong_nodes(store: SmallStore) -> list[str]:
    """What is wrong with any stored prompt: KV that is missing, or is not that of its tokens."""
    return [problem for node in store.tree.nodes() for problem in _problems(store.tree, store, node)]


def _problems(tree: DeltaTree, store: SmallStore, node: Node) -> Iterable[str]:
    fetched = store.keeper.tier.fetch(node.pieces.segment_ids)
    if fetched.missing or fetched.late:
        yield f"node {node.node_id}: {len(fetched.missing)} segments are missing, {len(fetched.late)} late"
        return
    for start, segment_id, offset, length in node.pieces.rows():
        position = tree.segment(SegmentId(segment_id)).first_position + offset
        expected = expected_rows(node.token_ids[start : start + length], position)
        found = [plane[:, offset : offset + length] for plane in fetched.segments[segment_id].planes]
        if not all(map(torch.equal, found, expected)):
            yield f"node {node.node_id}: wrong rows at {start}"
