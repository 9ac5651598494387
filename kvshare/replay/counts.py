"""
Many values -> what `results.json` has of them: histograms, percentiles, series; and the histograms' edges.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from kvshare.replay.results import Histogram, Milliseconds, Stretch

LENGTH_EDGES: Final = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
COUNT_EDGES: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
SHIFT_EDGES: Final = (0, 1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # absolute
DISTANCE_EDGES: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
OVERLAP_EDGES: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DISTANCE_THRESHOLDS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
# The keys under `by.length`: "512-1023", and "32768-" for the last.
LENGTH_BUCKETS: Final = (*(f"{a}-{b - 1}" for a, b in pairwise(LENGTH_EDGES)), f"{LENGTH_EDGES[-1]}-")

_MAX_STRETCHES = 200


def buckets(edges: ArrayLike, values: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The bucket of each value; values below the first edge count in the first."""
    return np.maximum(np.searchsorted(edges, values, side="right") - 1, 0)


def histogram(edges: tuple[int | float, ...], values: ArrayLike) -> Histogram:
    array = np.asarray(values)
    return Histogram(
        edges=edges,
        counts=tuple(np.bincount(buckets(edges, array), minlength=len(edges)).tolist()),
        mean=float(array.mean()) if len(array) else 0.0,
        max=array.max().item() if len(array) else 0.0,
        count=len(array),
    )


def milliseconds(seconds: ArrayLike) -> Milliseconds:
    """Percentiles are values that occurred; without any value all are 0."""
    array = 1000 * np.asarray(seconds, dtype=np.float64)
    array = array if len(array) else np.zeros(1)
    p50, p90, p99 = np.percentile(array, (50, 90, 99), method="inverted_cdf").tolist()
    return Milliseconds(mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()))


def stretches(rows: pa.Table) -> tuple[Stretch, ...]:
    """A policy's rows in at most 200 stretches of the stream, whose equal length is a power of two."""
    length = 1
    while length * _MAX_STRETCHES < len(rows):
        length *= 2
    starts = np.arange(0, len(rows), length)
    ends = np.minimum(starts + length, len(rows))
    tokens, hits = (np.add.reduceat(rows[name].to_numpy(), starts) for name in ("num_tokens", "num_hit"))
    first, stored = rows["index"].to_numpy()[starts], rows["num_stored_bytes"].to_numpy()[ends - 1]
    columns = (first, ends - starts, tokens, hits, stored)
    return tuple(map(Stretch._make, zip(*(column.tolist() for column in columns), strict=True)))
