"""Percentiles, this process's memory and files' sizes."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_KINDS = ("RssAnon", "RssFile")


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds at the 50th, 90th and 99th percentile, and the worst."""
    values: NDArray[np.float64] = 1e3 * np.asarray(seconds)
    found = {f"p{q}_ms": round(float(np.percentile(values, q)), 3) for q in (50, 90, 99)}
    return {**found, "max_ms": round(float(values.max()), 3)}


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
