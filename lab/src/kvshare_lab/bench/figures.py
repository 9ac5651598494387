"""Percentiles, intervals, the memory of this process and the sizes of files."""

import gc
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from scipy.stats import linregress, sem, t

_KINDS = ("RssAnon", "RssFile")
_CONFIDENCE = 0.95


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds at the 50th, 90th and 99th percentile, and the worst."""
    values = 1e3 * np.percentile(seconds, (50, 90, 99, 100))
    return dict(zip(("p50_ms", "p90_ms", "p99_ms", "max_ms"), values.round(3).tolist(), strict=True))


def by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each figure, where every row has a value of it or none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row[name] for row in rows if name in row] for name in names}


def interval(values: Sequence[float]) -> dict[str, float] | None:
    """Student's 95 % interval of the mean over repeats; None for fewer than two."""
    return None if len(values) < 2 else _around(float(np.mean(values)), sem(values), len(values) - 1)


def intervals(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float] | None]:
    """The interval of each of these figures."""
    return {name: interval(found) for name, found in values.items()}


def trend(values: Sequence[float]) -> tuple[float, dict[str, float] | None]:
    """
    Relative change from one value to the next, -0.01 for 1 % less each time, and its 95 % interval.

    The slope of a line through the logarithms. No interval for fewer than three values.
    Raises:  ValueError for fewer than two
    """
    if len(values) < 2:
        raise ValueError(f"a trend needs two values or more, got {len(values)}")
    line = linregress(np.arange(len(values)), np.log(values))
    if len(values) < 3:
        return float(np.expm1(line.slope)), None
    found = _around(line.slope, line.stderr, len(values) - 2)
    return float(np.expm1(line.slope)), {end: float(np.expm1(value)) for end, value in found.items()}


def _around(middle: float, error: float, freedom: int) -> dict[str, float]:
    reach = float(t.ppf((1 + _CONFIDENCE) / 2, freedom) * error)
    return {"low": middle - reach, "high": middle + reach}


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process: "RssAnon" is its own, "RssFile" is page cache that it has mapped."""
    gc.collect()
    return _resident(Path("/proc/self"))


def _resident(process: Path) -> dict[str, int]:
    """Of a folder in /proc; zeros if the process has ended."""
    try:
        lines = (process / "status").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: 1024 * int(fields.get(kind, "0").split()[0]) for kind in _KINDS}


def _children() -> list[Path]:
    """Return the folders in /proc of children, without those that still have this process's memory: forks."""
    found = (each.read_text(encoding="ascii").split() for each in Path("/proc/self/task").glob("*/children"))
    processes = [Path("/proc") / number for numbers in found for number in numbers]
    own = _command(Path("/proc/self"))
    return [process for process in processes if _command(process) != own]


def _command(process: Path) -> bytes:
    """Return the command line of a folder in /proc; nothing if the process has ended."""
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


class PeakMemory:
    """
    The most memory that this process and its children have together while it is entered, looked at ten times
    a second: `own_bytes` of their own, `bytes` with the files that they have mapped.
    """

    def __init__(self) -> None:
        self.own_bytes = self.bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.1):
            found = [_resident(process) for process in (Path("/proc/self"), *_children())]
            own, mapped = (sum(each[kind] for each in found) for kind in _KINDS)
            self.own_bytes, self.bytes = max(self.own_bytes, own), max(self.bytes, own + mapped)


def grown(before: dict[str, int]) -> dict[str, int]:
    """Bytes by which each kind of `memory_bytes` has grown since `before`."""
    return {kind: number - before[kind] for kind, number in memory_bytes().items()}


def per_prompt(memory: dict[str, int], num_prompts: int) -> dict[str, float]:
    """Bytes of memory for each of so many prompts, under the names that documents have for the two kinds."""
    own, mapped = (memory[kind] / num_prompts for kind in _KINDS)
    return {"metadata_bytes_per_prompt": own, "mapped_file_bytes_per_prompt": mapped}


def shard_bytes(folder: Path) -> dict[str, int]:
    """Bytes on disk of a Qdrant shard: each part of its segments, its write-ahead log, and the total."""
    sizes: Counter[str] = Counter()
    for path in filter(Path.is_file, folder.rglob("*")):
        parts = path.relative_to(folder).parts
        inside = parts.index("segments") + 2 if "segments" in parts else 0
        sizes[parts[min(inside, len(parts) - 1)]] += 512 * path.stat().st_blocks
    return {**dict(sizes.most_common()), "total": sizes.total()}


def drop_from_page_cache(folder: Path) -> None:
    """Make the next reader of these files wait for the disk, as after a restart of the machine."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
