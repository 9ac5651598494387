"""
How long a vLLM's disk tier takes to find what an earlier process has left: with its index, and without.

    python lab/scripts/time_disk_start.py [NUMBER [FOLDER]]

Writes so many small objects (100,000), without waiting for the device, and deletes them at the end.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from delta_tree import Segment, SegmentId
from kvshare.kv.layout import KVLayout
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import HeadsFirstForm
from kvshare.tiers.object_index import delete_index

LAYOUT = KVLayout.uniform(
    36, 8, 1, dtype=torch.bfloat16, device=torch.device("cpu")
)  # as many checks as 8 B models
FORM = HeadsFirstForm.of(LAYOUT, ("timed",))


class _WithoutSync(Files):
    def sync(self, descriptor: int) -> None:
        """Only how files are found is timed."""


def opened(folder: Path, files: Files) -> DiskTier:
    tier = DiskTier(folder, FORM, max_bytes=1 << 60, keep_free_bytes=0, files=files)
    tier.open()
    return tier


def timed(folder: Path) -> tuple[DiskTier, str]:
    """A tier that was opened, and what that took."""
    began, cpu_began = time.perf_counter(), time.process_time()
    tier = opened(folder, Files())
    found = tier.described()
    tier.adopt(found)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return tier, f"{len(found)} objects in {seconds:.2f} s, {cpu_s:.2f} s of a core"


def main(number: int, folder: Path) -> None:
    tier = opened(folder, _WithoutSync())
    (plane,) = FORM.planes(1)
    rows = (np.zeros((plane.shape[0], plane.layer_bytes), dtype=np.uint8),)
    for segment_id in range(1, number + 1):
        segment = Segment(SegmentId(segment_id), "ab" * 32, 0, 1, 0, rows[0].nbytes, segment_id)
        tier.write(segment, rows)
    began = time.perf_counter()
    tier.save_index()
    sys.stdout.write(f"the index is written in {time.perf_counter() - began:.2f} s" + "\n")
    for _ in range(3):
        tier, what = timed(folder)
        sys.stdout.write(f"with an index: {what}\n")
    delete_index(Files(), folder / FORM.fingerprint[:16])
    sys.stdout.write(f"without: {timed(folder)[1]}\n")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as made:
        main(count, Path(made))
