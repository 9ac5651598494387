"""Percentiles, intervals, this process's memory and files' sizes."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import linregress, t

_KINDS = ("RssAnon", "RssFile")
_CONFIDENCE = 0.95


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds at the 50th, 90th and 99th percentile, and the worst."""
    values: NDArray[np.float64] = 1e3 * np.asarray(seconds)
    found = {f"p{q}_ms": round(float(np.percentile(values, q)), 3) for q in (50, 90, 99)}
    return {**found, "max_ms": round(float(values.max()), 3)}


def interval(values: Sequence[float]) -> dict[str, float] | None:
    """Student's 95 % interval of the mean over repeats; None for fewer than two."""
    if len(values) < 2:
        return None
    middle = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / np.sqrt(len(values))
    return _around(middle, error, len(values) - 1)


def intervals(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float] | None]:
    """The same of several figures."""
    return {name: interval(found) for name, found in values.items()}


def trend(values: Sequence[float]) -> tuple[float, dict[str, float] | None]:
    """
    Relative change from one value to the next, -0.01 for 1 % less each time, and its 95 % interval.

    The slope of a line through the logarithms; no interval for fewer than three values.
    """
    if len(values) < 2:
        raise ValueError("a trend needs two values")
    line = linregress(np.arange(len(values)), np.log(values))
    if len(values) < 3:
        return float(np.expm1(line.slope)), None
    found = _around(float(line.slope), float(line.stderr), len(values) - 2)
    return float(np.expm1(line.slope)), {end: float(np.expm1(value)) for end, value in found.items()}


def _around(middle: float, error: float, freedom: int) -> dict[str, float]:
    reach = float(t.ppf((1 + _CONFIDENCE) / 2, freedom)) * error
    return {"low": middle - reach, "high": middle + reach}


def memory_bytes() -> dict[str, int]:
    """Of this process, native parts included: "RssAnon" is its own, "RssFile" page cache it has mapped."""
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: 1024 * int(fields[kind].split()[0]) for kind in _KINDS}


def grown(before: dict[str, int]) -> dict[str, int]:
    """By how much memory has grown since `before`, kind by kind."""
    return {kind: number - before[kind] for kind, number in memory_bytes().items()}


def per_prompt(memory: dict[str, int], num_prompts: int) -> dict[str, float]:
    """What storing so many prompts took of this process's memory, for each."""
    own, mapped = (memory[kind] / num_prompts for kind in _KINDS)
    return {"metadata_bytes_per_prompt": own, "mapped_file_bytes_per_prompt": mapped}


def shard_bytes(folder: Path) -> dict[str, int]:
    """Bytes on disk of a Qdrant shard: by part of its segments, its log, and together."""
    sizes: Counter[str] = Counter()
    for path in _files(folder):
        parts = path.relative_to(folder).parts
        inside = parts.index("segments") + 2 if "segments" in parts else 0
        sizes[parts[min(inside, len(parts) - 1)]] += 512 * path.stat().st_blocks
    return {**dict(sizes.most_common()), "total": sizes.total()}


def drop_from_page_cache(folder: Path) -> None:
    """Let the next reader of these files wait for the disk, as after a start of the machine."""
    os.sync()
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
