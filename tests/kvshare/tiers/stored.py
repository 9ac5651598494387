"""Segments of a small model, and a disk tier for them."""

from pathlib import Path

import numpy as np
import torch

from delta_tree import Segment, SegmentId
from kvshare.kv.layout import KVLayout
from kvshare.kv.sequence import SegmentKV
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import ObjectForm

LAYOUT = KVLayout.uniform(2, 3, 4, dtype=torch.float32, device=torch.device("cpu"))
NAMESPACE = "ab" * 32


def form(layout: KVLayout = LAYOUT, *parts: str) -> ObjectForm:
    return ObjectForm.of(layout, parts or ("model",))


def segment(number: int, num_tokens: int = 8, layout: KVLayout = LAYOUT) -> tuple[Segment, SegmentKV]:
    """A segment whose KV is drawn from its number."""
    draw = torch.Generator().manual_seed(number)
    planes = tuple(
        torch.randn(plane.shape(num_tokens), generator=draw).to(layout.dtype) for plane in layout.planes
    )
    kv = SegmentKV(planes)
    described = Segment(SegmentId(number), NAMESPACE, 0, num_tokens, 0, kv.num_bytes, kv.checksum())
    return described, kv


def disk_at(
    folder: Path,
    *,
    of: ObjectForm | None = None,
    max_bytes: int = 10**9,
    keep_free_bytes: int = 0,
    files: Files | None = None,
) -> DiskTier:
    """An opened tier."""
    tier = DiskTier(folder, of or form(), max_bytes=max_bytes, keep_free_bytes=keep_free_bytes, files=files)
    tier.open()
    return tier


def is_same(rows: tuple[np.ndarray, ...] | None, kv: SegmentKV) -> bool:
    return rows is not None and all(map(np.array_equal, rows, kv.rows()))


def only_file(folder: Path) -> Path:
    """The one object below a folder."""
    (found,) = folder.rglob("*.kv")
    return found
