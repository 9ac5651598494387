"""
A process that is killed at any call to the disk: the next one serves no wrong byte, and has what was on disk.

What the disk holds at a kill is a copy of the store, made at each create, write (torn in the middle), sync,
rename and delete, while prompts are stored, lengthened and evicted, under a clock that jumps. Another process
is then opened on it.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import pytest

from delta_tree import NodeId
from kvshare.tiers.files import Files
from tests.kvshare.tiers.small_store import PROMPT_TOKENS, SmallStore, wrong_nodes


@dataclass
class WatchedFiles(Files):
    """Copies the store at each call. Who stores prompts holds `gate`, so that no call comes meanwhile."""

    folder: Path
    copies: Path
    gate: threading.RLock = field(default_factory=threading.RLock)
    points: list[tuple[str, Path]] = field(default_factory=list)

    def _copy(self, call: str) -> None:
        target = self.copies / str(len(self.points))
        for path in self.folder.rglob("*"):
            if path.is_file() and "index" not in path.parts:
                copy = target / path.relative_to(self.folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                # An object never changes once it has its name.
                os.link(path, copy) if path.suffix == ".kv" else shutil.copy(path, copy)
        self.points.append((call, target))

    def create(self, path: Path) -> int:
        with self.gate:
            self._copy("create")
            return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        with self.gate:
            self._copy("write")
            return super().write(descriptor, data[: max(2048, len(data) // 2)])

    def sync(self, descriptor: int) -> None:
        with self.gate:
            self._copy("sync")
            super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        with self.gate:
            self._copy("rename")
            super().rename(source, target)
            self._copy("renamed")

    def delete(self, path: Path) -> None:
        with self.gate:
            self._copy("delete")
            super().delete(path)
            self._copy("deleted")


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is such a file system: a thousand copies of a store take a while on a disk."""
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("num_prompts", "least_points"), [(10, 200), pytest.param(42, 1000, marks=pytest.mark.long)]
)
def test_a_kill_at_any_call_to_the_disk(
    quick_folder: Path, monkeypatch: pytest.MonkeyPatch, num_prompts: int, least_points: int
) -> None:
    """At each of hundreds of points; of a thousand where there is time."""
    jumps = cycle([0.0, 3e7, -3e7, 86400.0])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    files = WatchedFiles(quick_folder / "store", quick_folder / "copies")
    store = SmallStore(files.folder, memory=9, disk=15, files=files)
    wrong: list[str] = []
    num_points = 0
    for number in range(num_prompts):
        before = store.safe()
        with files.gate:
            node = store.store(number)
        store.settle()
        if node is not None and number % 3 == 0:
            with files.gate:
                store.lengthen(node, number, PROMPT_TOKENS + 9)
            store.settle()
        after = store.safe()
        for call, folder in files.points:
            kept = before.keys() & after.keys()  # maybe shortened meanwhile
            promised = {each: min(before[each].num_tokens, after[each].num_tokens) for each in kept}
            wrong += [f"{call}, prompt {number}: {problem}" for problem in problems_at(folder, promised)]
            shutil.rmtree(folder)
        num_points += len(files.points)
        files.points.clear()
    store.close()
    assert wrong == []
    assert num_points >= least_points


def problems_at(folder: Path, promised: dict[NodeId, int]) -> Iterator[str]:
    """What is wrong with the store that a killed process left."""
    store = SmallStore(folder, memory=9, disk=15)
    try:
        yield from wrong_nodes(store)
        for node_id, num_tokens in promised.items():
            found = store.tree.get(node_id)
            if found is None or found.num_tokens < num_tokens:
                yield f"node {node_id} is lost"
        expected = {f"{segment.segment_id:016x}.kv" for segment in store.tree.segments()}
    finally:
        store.close()
    if {path.name for path in folder.rglob("*.kv*")} != expected:
        yield "files and prompts differ"
