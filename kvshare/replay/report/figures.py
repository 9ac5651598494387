"""Which plots there are, under what name, with which words; a file name each."""

from __future__ import annotations

from dataclasses import dataclass

from kvshare.replay.report import plots, shapes
from kvshare.replay.report.reading import Report

_NO_KVSHARE = "no arm of KVShare was replayed"
_NO_LIKENESS = "no arm looked at meaning, or no request had an earlier prompt"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plot with its words; `svg` None: there is nothing to draw, and `missing` says why."""

    title: str
    caption: str
    svg: str | None
    missing: str


def draw(report: Report) -> dict[str, Drawn]:
    """All plots by file name, in the order of the page."""
    return _of_kvshare(report) | _of_all_arms(report) | _of_likeness(report) | _of_the_store(report)


def _of_kvshare(report: Report) -> dict[str, Drawn]:
    kvshare = report.kvshare
    losses = next((one for one in report.waterfall if kvshare and one.arm == kvshare.label), None)
    return {
        "savings": Drawn(
            f"Where the tokens go{f': {kvshare.label}' if kvshare else ''}",
            "From all prompt tokens down to those that are computed because nothing equal was found. "
            "Repaired tokens are equal to an earlier prompt's and computed again for fidelity.",
            shapes.savings(kvshare) if kvshare else None,
            _NO_KVSHARE if kvshare is None else "the log has no tokens",
        ),
        "oracle-losses": Drawn(
            "What is left of the oracle's share",
            "The oracle covers every token in a stretch of 16 that an earlier prompt had. Not found: "
            "the donors that KVShare nominated did not have it. Too short: prompts this short are not looked "
            "up. Refused: they had it, and a gate said no, for the KV's generation, or for another reason of "
            "quality or cost.",
            shapes.oracle_losses(losses) if losses else None,
            "it takes an oracle and an arm of KVShare, both with an infinite store",
        ),
    }


def _of_all_arms(report: Report) -> dict[str, Drawn]:
    return {
        "hit-rate-over-time": Drawn(
            "Hit rate over time",
            "Infinite stores. Each point averages a twentieth of the log before it; the legend has the rate "
            "of all requests.",
            plots.hit_rate_over_time(report.endless),
            "no arm keeps anything",
        ),
        "hit-rate-against-capacity": Drawn(
            "Hit rate against capacity",
            "What a store of limited size, which evicts, leaves of the savings. Capacity is in tokens of KV.",
            plots.hit_rate_against_capacity(report.arms),
            "no finite store was replayed; --capacity 100k,1M adds some",
        ),
        "coverage": Drawn(
            "Coverage of requests",
            "How many requests need not compute at least so many percent of their tokens. The dotted lines "
            "are the paper's readings: 50, 70 and 90 %.",
            plots.coverage(report.endless),
            "no arm keeps anything",
        ),
    }


def _of_likeness(report: Report) -> dict[str, Drawn]:
    similarity = report.similarity
    return {
        "similarity": Drawn(
            "Similarity against token overlap",
            "Requests by how near the nearest earlier prompt is in meaning and how many of their tokens an "
            "earlier prompt had. Near in meaning with few tokens in common (bottom left) is where meaning "
            "misleads; far with many in common (top right) is what meaning does not find.",
            shapes.likeness(similarity) if similarity else None,
            _NO_LIKENESS,
        ),
        "similarity-points": Drawn(
            "The same, request by request",
            f"{len(report.points):,} requests, evenly picked from the log.",
            shapes.likeness_points(report.points, similarity.overlap) if similarity else None,
            _NO_LIKENESS,
        ),
    }


def _of_the_store(report: Report) -> dict[str, Drawn]:
    kvshare = report.kvshare
    return {
        "tree": Drawn(
            "Tree depth and fan-out",
            _tree_caption(report),
            shapes.tree_shape(kvshare.tree) if kvshare and kvshare.tree else None,
            _NO_KVSHARE if kvshare is None else "no tree was built",
        ),
        "store-over-time": Drawn(
            "Store size over time",
            "Infinite stores, at the configured bytes of KV per token.",
            plots.store_over_time(report.endless),
            "no arm keeps anything",
        ),
    }


def _tree_caption(report: Report) -> str:
    kvshare = report.kvshare
    if kvshare is None or kvshare.tree is None:
        return ""
    known = sorted(name for name in kvshare.tree.model_fields_set if name.startswith("num_"))
    told = ", ".join(
        f"{getattr(kvshare.tree, name):,} {name.removeprefix('num_').replace('_', ' ')}" for name in known
    )
    return f"How prompts are made of earlier ones in “{kvshare.label}”: {told}."
