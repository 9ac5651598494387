"""Figures -> the parts of `results.json`, and JSON -> disk."""

from __future__ import annotations

import json
from pathlib import Path

from kvshare.replay.arms import Arm
from kvshare.replay.histograms import Histogram
from kvshare.replay.measures import ArmMeasures
from kvshare.replay.results import COUNT_EDGES, Document, arm_label


def write_document(path: Path, document: Document) -> None:
    """JSON that appears whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def arm_document(arm: Arm, measures: ArmMeasures) -> Document:
    """`Arm` of results.py."""
    label, capacity = arm_label(arm.name, arm.capacity_tokens), arm.capacity_tokens
    return {
        "arm": arm.name,
        "label": label,
        "family": arm.family,
        "capacity_tokens": capacity,
        "capacity_bytes": None if capacity is None else capacity * arm.bench.bytes_per_token,
        "options": arm.options,
        **measures.document(),
        "tree": _tree_document(arm.describe_tree()),
    }


def _tree_document(tree: Document | None) -> Document | None:
    if tree is None:
        return None
    depth, children = Histogram(COUNT_EDGES), Histogram(COUNT_EDGES)
    for value in tree.pop("depths"):
        depth.add(value)
    for value in tree.pop("children"):
        children.add(value)
    return {"depth": depth.document(), "children": children.document(), **tree}
