"""
How long a start takes with many small objects on disk, without a model: of the embedded engine, which knows
them from its tree, and of a vLLM, which has an index of its files.

The objects are written without waiting for the device, and deleted at the end.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from delta_tree import NodeDraft, Piece, PieceTable, Segment, SegmentId, new_segment_id, token_ids
from kvshare.embedded.stored_kv import StoredKV
from kvshare.kv.layout import KVLayout
from kvshare.kv.sequence import SegmentKV
from kvshare.settings import load_settings
from kvshare.tiers import KV_FOLDER
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import HeadsFirstForm, ObjectForm
from kvshare.tiers.object_index import delete_index

_T = TypeVar("_T")
_PER_PROMPT, _SEGMENT_TOKENS = 10, 16  # of the embedded engine's store
_LAYERS, _HEADS = 36, 8  # of vLLM's, so that a file has as many checks as with a model of 8 B


class _UnsyncedFiles(Files):
    """Does not wait for the device, as nothing is measured while objects are written."""

    def sync(self, descriptor: int) -> None:
        pass


def of_embedded(num_objects: int) -> dict[str, Any]:
    """Write a store of small objects, ten to a prompt, and time how a process opens it."""
    layout = KVLayout.uniform(1, 1, 8, dtype=torch.float32, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(overrides={"store.path": folder, "store.disk_keep_free_bytes": 0}).store
        stored = StoredKV(settings, layout, min_tokens=1, identity="bench", parts=())
        tree, _ = stored.open_tree()
        disk = _opened(Path(folder) / KV_FOLDER, ObjectForm.of(layout, ()), _UnsyncedFiles())
        rng = np.random.default_rng(0)
        for _ in range(num_objects // _PER_PROMPT):
            tokens = token_ids(rng.integers(1, 30_000, _PER_PROMPT * _SEGMENT_TOKENS))
            pairs = [_object(layout, place * _SEGMENT_TOKENS) for place in range(_PER_PROMPT)]
            pieces = PieceTable(Piece(SegmentId(one.segment_id), 0, _SEGMENT_TOKENS) for one, _ in pairs)
            tree.insert(NodeDraft("bench", tokens, None, pieces, tuple(one for one, _ in pairs), len(tokens)))
            for one, kv in pairs:
                disk.write(one, kv.rows())
        tree.close()
        again = StoredKV(settings, layout, min_tokens=1, identity="bench", parts=())
        (tree, forgotten), seconds, core_s = _timed(again.open_tree)
        num_nodes = tree.stats().num_nodes
        keeper = again.new_keeper(tree)
        missing = keeper.tier.fetch(tree.nodes()[-1].pieces.segment_ids).missing
        keeper.close()
        tree.close()
    return {
        "objects": num_objects,
        "open_s": seconds,
        "open_core_s": core_s,
        "prompts_found": num_nodes,
        "prompts_lost": len(forgotten) + len(missing),
    }


def of_vllm(num_objects: int) -> dict[str, Any]:
    """Write the files of a vLLM, and time how another one finds them: by the index, and by their headers."""
    layout = KVLayout.uniform(_LAYERS, _HEADS, 1, dtype=torch.bfloat16, device=torch.device("cpu"))
    form = HeadsFirstForm.of(layout, ("timed",))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tier = _opened(folder, form, _UnsyncedFiles())
        (plane,) = form.planes(1)
        rows = (np.zeros((plane.shape[0], plane.layer_bytes), dtype=np.uint8),)
        for segment_id in range(1, num_objects + 1):
            tier.write(Segment(SegmentId(segment_id), "ab" * 32, 0, 1, 0, rows[0].nbytes, segment_id), rows)
        tier.save_index()
        found, seconds, core_s = _timed(lambda: _found(folder, form))
        delete_index(Files(), folder / form.fingerprint[:16])
        _, without_s, without_core_s = _timed(lambda: _found(folder, form))
    return {
        "objects": num_objects,
        "open_s": seconds,
        "open_core_s": core_s,
        "objects_found": len(found),
        "without_index_s": without_s,
        "without_index_core_s": without_core_s,
    }


def _found(folder: Path, form: HeadsFirstForm) -> list[Segment]:
    """What a vLLM that starts finds."""
    tier = _opened(folder, form, Files())
    found = tier.described()
    tier.adopt(found)
    return found


def _opened(folder: Path, form: ObjectForm, files: Files) -> DiskTier:
    tier = DiskTier(folder, form, max_bytes=1 << 60, keep_free_bytes=0, files=files)
    tier.open()
    return tier


def _timed(act: Callable[[], _T]) -> tuple[_T, float, float]:
    """Its result, and the seconds that it took: by the clock, and of all cores."""
    began, core_began = time.perf_counter(), time.process_time()
    found = act()
    return found, time.perf_counter() - began, time.process_time() - core_began


def _object(layout: KVLayout, position: int) -> tuple[Segment, SegmentKV]:
    kv = SegmentKV(tuple(torch.randn(plane.shape(_SEGMENT_TOKENS)) for plane in layout.planes))
    described = Segment(new_segment_id(), "bench", position, _SEGMENT_TOKENS, 0, kv.num_bytes, kv.checksum())
    return described, kv
