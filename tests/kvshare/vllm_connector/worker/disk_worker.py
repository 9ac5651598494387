"""
The real worker over a small cache, with files or a shared store below its memory; each segment has rows of
one value.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_tree import Segment, SegmentId, Span
from kvshare.settings import SharedTierSettings
from kvshare.tiers.disk_and_shared import DiskAndShared
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.files import Files
from kvshare.tiers.lower_tier import LowerTier
from kvshare.tiers.shared_start import open_shared_tier
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import (
    DIM,
    HEADS,
    LAYERS,
    NUM_TOKENS,
    late_copies,
    new_worker,
    use,
)

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadResult, StepMetadata, WorkerReport
    from kvshare.vllm_connector.worker.disk_store import DiskStore

SOURCE, TARGET = (1, 2, 3), (4, 5, 6)
LAST = NUM_TOKENS - 1  # tokens of a segment that are copied


class DiskWorker:
    """One process; another one in the same folder is a restart. Call it inside of `one_rank`."""

    def __init__(
        self,
        folder: Path | None,
        *,
        max_segments: int = 4,
        files: Files | None = None,
        shared: SharedTierSettings | None = None,
        max_disk_bytes: int = 1 << 30,
    ) -> None:
        """`folder`: None: no disk. `shared`: of a store that other workers use, too."""
        from kvshare.tiers.kv_object import HeadsFirstForm
        from kvshare.vllm_connector.worker.disk_store import DiskStore
        from kvshare.vllm_connector.worker.start import Attached

        self.worker = new_worker(max_segments)
        attached = self.worker.attached
        self.cache, layout = attached.cache, attached.cache.kv_layout
        form = HeadsFirstForm.of(layout, ())
        self.disk = DiskTier(
            folder or Path("/nowhere"), form, max_bytes=max_disk_bytes, keep_free_bytes=0, files=files
        )
        below: LowerTier = self.disk
        if folder is not None:
            self.disk.open()
            self.found = self.disk.described()
            self.disk.adopt(self.found)
        if shared is not None:
            self.shared = open_shared_tier(shared, form, announces_segments=True)
            below = self.shared if folder is None else DiskAndShared(self.disk, self.shared, makes_way=True)
        self.store: DiskStore = DiskStore(attached.store.arena.buffer, layout, below, write_bytes_per_s=1e12)
        use(self.worker, Attached(self.cache, attached.forward, self.store))
        self.written: list[int] = []  # as it has reported
        self.problems: list[str | None] = []  # the same, with each report

    def step(self, **own: Any) -> WorkerReport | None:
        """A step of vLLM in which all copies end that can."""
        from kvshare.vllm_connector.metadata import StepMetadata

        step: StepMetadata = StepMetadata(**own)
        self.worker.begin(step)
        late_copies(self.worker).run()
        self.worker.advance(step)
        self.worker.save(step)
        late_copies(self.worker).run()
        self.worker.take_transfers()
        report = self.worker.build_connector_worker_meta()
        if report is not None and report.disk is not None:
            self.written += report.disk.written
            self.problems.append(report.disk.problem)
        return report

    def save(self, *numbers: int) -> None:
        """Segments of these numbers, with rows of that value; and have them written."""
        import torch

        from kvshare.vllm_connector.metadata import SaveRequest, WriteRequest

        for number in numbers:
            rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), float(number))
            self.cache.write(rows, -rows, self.cache.slots(SOURCE, Span(0, NUM_TOKENS)))
            spans = ((SegmentId(number), Span(0, NUM_TOKENS)),)
            self.step(saves=(SaveRequest(f"s{number}", SOURCE, spans),))
            self.step()
        self.step(writes=tuple(WriteRequest(SegmentId(number), "n", 0) for number in numbers))

    def wait_written(self, *numbers: int, within_s: float = 60.0) -> None:
        """Until their files are reported as whole."""
        deadline = time.monotonic() + max(within_s, 120)
        while not set(numbers) <= set(self.written):
            assert time.monotonic() < deadline, f"{self.written} were written"
            time.sleep(0.002)
            self.step()

    def load(
        self, number: int, *, within_s: float = 60.0, shared: Sequence[Segment] = ()
    ) -> tuple[LoadResult, float]:
        """
        A prompt whose tokens but the last are copied from a segment. Returns the value of its rows.

        `shared`: what is known of segments that others have written.
        """
        from kvshare.vllm_connector.metadata import LoadRequest

        copy = WireCopy(SegmentId(number), 0, LAST, 0, 0)
        tokens = tuple(range(NUM_TOKENS))
        load = LoadRequest(
            "l", TARGET, 0, NUM_TOKENS, tokens, (copy,), reads_within_s=within_s, shared=tuple(shared)
        )
        report, deadline = self.step(loads=(load,)), time.monotonic() + 120
        while report is None or "l" not in report.loads:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            report = self.step()
        rows = self.cache.read(TARGET, Span(0, LAST)).k
        values = {float(value) for value in rows[:, 0].flatten()}
        assert len(values) == 1
        assert (rows == rows[:1, :, :1, :1]).all(), "all layers and heads are of one kind"
        return report.loads["l"], values.pop()

    def path(self, number: int) -> Path:
        return self.disk._path(SegmentId(number))

    def close(self) -> None:
        self.store.close()


class SnapshotFiles(Files):
    """Copies the folder before each call that changes it, as a kill would leave it."""

    def __init__(self, folder: Path, snapshots: Path) -> None:
        self.folder, self.snapshots = folder, snapshots
        self.points: list[tuple[Path, Sequence[int]]] = []
        self.promised: list[int] = []

    def _snap(self) -> None:
        target = self.snapshots / str(len(self.points))
        shutil.copytree(self.folder, target)
        self.points.append((target, tuple(self.promised)))

    def create(self, path: Path) -> int:
        self._snap()
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        """A part at a time, so that files are torn in several places."""
        self._snap()
        return super().write(descriptor, data[: max(1, len(data) // 2)] if len(data) > 512 else data)

    def sync(self, descriptor: int) -> None:
        self._snap()
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._snap()
        super().rename(source, target)
        self._snap()

    def delete(self, path: Path) -> None:
        self._snap()
        super().delete(path)
        self._snap()
