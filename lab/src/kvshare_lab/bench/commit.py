"""
`kvshare bench commit`: time to store a prompt in a full store, which evicts another, over a half-full one.

The server's own keeper, tree and metadata file; KV is only counted. Prompts are variants of some templates.
The two stores take turns, a block of prompts each, so that whatever else the machine does affects both.
"""

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tree import DeltaTree
from delta_tree.node import Change
from delta_tree.storage import Storage
from kvshare.replay.policies.sharing import WeightlessKV
from kvshare.telemetry import EvictionCause
from kvshare_lab.bench.counted_store import CountedStore, Variants
from kvshare_lab.bench.figures import percentiles

_TEMPLATES = 200
_VARIANTS = 50  # of each template in the full store, at the least: so no template is the oldest prompt
_BLOCK = 50  # prompts that are stored in a row in one store


def run(
    *, stored: int = 10_000, prompt_tokens: int = 500, commits: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Times to store `commits` new variants, in each of two stores with room for `stored` prompts."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        source = CountedStore()
        num_templates = min(_TEMPLATES, max(1, stored // _VARIANTS))
        variants = Variants(rng, source, num_templates=num_templates, num_tokens=prompt_tokens)
        half = _opened(Path(folder) / "half.sqlite3", _filled(source, variants, stored // 2))
        full = _opened(Path(folder) / "full.sqlite3", _filled(source, variants, stored))
        full.tier.max_bytes = half.tier.max_bytes = full.tier.num_bytes
        fill_s = time.perf_counter() - began
        stores = (half, full)
        seconds = [
            [[_commit_s(store, variants) for _ in range(min(commits, _BLOCK))] for store in stores]
            for _ in range(max(1, commits // _BLOCK))
        ]
        in_half, in_full = np.array(seconds).transpose(1, 0, 2)  # (blocks, commits of a block) each
        arms = {"half_full": _figures(half, in_half), "full": _figures(full, in_full)}
        for store in stores:
            store.tree.close()
    return {
        "commits": in_full.size,
        "fill_s": fill_s,
        **arms,
        # Means of neighbouring blocks, so that work which is done once in many commits counts.
        "full_over_half": float(np.median(in_full.mean(axis=1) / in_half.mean(axis=1))),
    }


def _filled(store: CountedStore, variants: Variants, num_prompts: int) -> Change:
    """The first `num_prompts`, as a change that writes them into an empty file."""
    tree = store.tree
    while tree.stats().num_nodes < num_prompts:
        _commit_s(store, variants)
    nodes = tree.nodes()
    lines = ((node.node_id, tree.ancestors(node.node_id)) for node in nodes)
    parents = {node_id: line[0] for node_id, line in lines if line}
    return Change(put_segments=tree.segments(), put_nodes=nodes, parents=parents)


def _opened(path: Path, content: Change) -> CountedStore:
    """A store with a metadata file, filled in one transaction: one per prompt would take most of an hour."""
    with closing(Storage.open(path, identity="bench", read_only=False)) as storage:
        storage.write([content], ())
    store = CountedStore(DeltaTree.open(path, identity="bench"))
    for segment in content.put_segments:
        store.tier.put(segment.segment_id, WeightlessKV(segment.num_bytes), 0)
    return store


def _commit_s(store: CountedStore, variants: Variants) -> float:
    """Seconds to store a new prompt, as a server does after its answer."""
    variant = variants.draw()
    store.tree.touch(variants.templates[variant.number].node_id)  # as when the plan was taken
    began = time.perf_counter()
    store.store(variant.tokens, variant.plan)
    return time.perf_counter() - began


def _figures(store: CountedStore, seconds: NDArray[np.float64]) -> dict[str, float]:
    """Percentiles of all commits, and what the store holds after them."""
    evictions = store.keeper.telemetry.counts().evictions[EvictionCause.CAPACITY]
    return {
        **percentiles(seconds.ravel().tolist()),
        "num_prompts": store.tree.stats().num_nodes,
        "evictions_per_commit": evictions / seconds.size,
    }
