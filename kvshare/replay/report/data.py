"""
What the report shows, as small typed values.

A number that is missing, null or not finite is None, and a part that is not there is empty: the rest draws
what there is. reading.py makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvshare.replay.results import Document

SHARES: Final = (50, 70, 90)  # percent of a request's tokens: the paper's readings


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one arm over some requests. Rates are shares of 1."""

    num_requests: int
    num_tokens: int
    num_hit_tokens: int
    num_exact_tokens: int
    num_repaired_tokens: int
    token_hit_rate: float | None
    request_hit_rate: float | None
    at_least: tuple[float | None, ...]  # of `SHARES`
    recomputed: float | None
    saved_mean_s: float | None
    saved_total_s: float | None
    num_answered: int
    num_false_hits: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bucket i holds [edges[i], edges[i + 1]); the last one is open."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the stream."""

    first: int
    num_requests: int
    num_tokens: int
    num_hit: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tree:
    """How prompts were made of earlier ones."""

    depth: Histogram
    children: Histogram
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One way of caching with one store; `capacity_tokens` None: infinite."""

    arm: str
    label: str
    family: str
    capacity_tokens: int | None
    figures: Figures
    coverage: tuple[int, ...]  # requests by percent of tokens not computed
    series: tuple[Stretch, ...]
    by: Mapping[str, Mapping[str, Figures]]
    final_bytes: int | None
    peak_bytes: int | None
    reasons: Mapping[str, int]
    num_copies: Histogram
    num_donors: Histogram
    shifts: Histogram
    tree: Tree | None
    times_ms: Mapping[str, Mapping[str, float | None]]  # "lookup" | "plan" | "observe" -> "p50" ...
    saved_net_mean_s: float | None


@dataclass(frozen=True, slots=True)
class Similarity:
    """Requests by distance to the nearest earlier prompt (rows) and share of tokens in common (columns)."""

    distance_edges: tuple[float, ...]
    overlap_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]
    overlap: str
    thresholds: tuple[tuple[float, float], ...]  # distance, share of requests


@dataclass(frozen=True, slots=True)
class Waterfall:
    """From what the oracle covers down to what was not computed."""

    arm: str
    num_tokens: int
    steps: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the page shows. `points`: (distance, overlap) of single requests."""

    arms: tuple[ArmReport, ...]
    similarity: Similarity | None
    waterfalls: tuple[Waterfall, ...]
    points: tuple[tuple[float, float], ...]
    config: Document
    data: Document
    versions: Document
    times: Document

    @property
    def endless(self) -> tuple[ArmReport, ...]:
        """The arms with an infinite store."""
        return tuple(arm for arm in self.arms if arm.capacity_tokens is None)

    @property
    def kvshare(self) -> ArmReport | None:
        """KVShare as it would be served: not with its gates open, if there is another."""
        found = [arm for arm in self.endless if arm.family == "kvshare"]
        found.sort(key=lambda arm: (arm.arm != "kvshare", "-open" in arm.arm.split(":")[0]))
        return found[0] if found else None

    def find(self, family: str) -> ArmReport | None:
        """The first arm of a family, with an infinite store."""
        return next((arm for arm in self.endless if arm.family == family), None)
