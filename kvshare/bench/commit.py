"""
`kvshare bench commit`: committing a prompt into a full store, which evicts another one, over a half-full one.

The server's own keeper, tree and metadata file; KV is only counted. Prompts are variants of some templates.
All differ from theirs in the same places, so a template's variants have one plan. The two stores take turns,
a block of commits each, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tree import DeltaTree, Node, NodeId, TokenIds
from delta_tree.change import Change
from delta_tree.storage import Storage
from kvshare.bench.harness import edited, milliseconds, random_prompt
from kvshare.replay.arms.weightless import WeightlessKV, WeightlessSequence, WeightlessTier
from kvshare.settings import load_settings
from kvshare.sharing.cost import Rates
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import PlannerLimits, make_plan

_NAMESPACE = "bench"
_VOCAB_SIZE = 32_000
_TEMPLATES = 200
_CHANGED, _EDITS = 0.1, 5
_BLOCK = 50  # commits in a row into one store
_RATES = Rates(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e9, bytes_per_token=1024)


def run(
    *, stored: int = 10_000, prompt_tokens: int = 500, commits: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Times of `commits` new variants in each of two stores with room for `stored` prompts, one full."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        variants = _Variants(rng, num_templates=min(_TEMPLATES, stored // 4), num_tokens=prompt_tokens)
        half = _Store(Path(folder) / "half.sqlite3", variants.stored(stored // 2))
        full = _Store(Path(folder) / "full.sqlite3", variants.stored(stored))
        full.tier.max_bytes = half.tier.max_bytes = full.tier.num_bytes
        fill_s = time.perf_counter() - began
        stores = (half, full)
        seconds = [
            [[store.commit(variants) for _ in range(min(commits, _BLOCK))] for store in stores]
            for _ in range(max(1, commits // _BLOCK))
        ]
        in_half, in_full = np.array(seconds).transpose(1, 0, 2)  # (blocks, commits of a block) each
        arms = {"half_full": half.describe(in_half), "full": full.describe(in_full)}
        for store in stores:
            store.tree.close()
    return {
        "benchmark": "commit",
        "stored": stored,
        "prompt_tokens": prompt_tokens,
        "commits": in_full.size,
        "seed": seed,
        "fill_s": fill_s,
        **arms,
        # Of neighbouring blocks, by all their commits: what comes with every hundredth is in it.
        "full_over_half": float(np.median(in_full.mean(axis=1) / in_half.mean(axis=1))),
    }


class _Variants:
    """Prompts that each differ from a template, as many as are asked for, in a tree without a file."""

    def __init__(self, rng: np.random.Generator, *, num_templates: int, num_tokens: int) -> None:
        self._rng = rng
        self._tree = DeltaTree.open(None, identity="bench")
        self._keeper = MemoryKeeper(self._tree, WeightlessTier(None), min_tokens=1)
        self._templates = [self._template(num_tokens) for _ in range(num_templates)]
        limits = PlannerLimits.from_settings(load_settings())
        self._plans = [
            make_plan(
                self._edited(node), [node], self._tree.segment, approximate=True, limits=limits, rates=_RATES
            )
            for node in self._templates
        ]

    def stored(self, num_prompts: int) -> Change:
        """The first so many, as they would be written into an empty file."""
        while self._tree.stats().num_nodes < num_prompts:
            template, computed = self.draw()
            self._tree.touch(template)
            self._keeper.commit(computed)
        nodes = self._tree.nodes()
        lines = ((node.node_id, self._tree.ancestors(node.node_id)) for node in nodes)
        return Change(
            put_segments=self._tree.segments(),
            put_nodes=nodes,
            parents={node_id: line[0] for node_id, line in lines if line},
        )

    def draw(self) -> tuple[NodeId, Computed[WeightlessKV]]:
        """A new one as an engine hands it over, and its template."""
        number = int(self._rng.integers(len(self._templates)))
        template = self._templates[number]
        return template.node_id, _computed(self._edited(template), self._plans[number])

    def _template(self, num_tokens: int) -> Node:
        tokens = random_prompt(self._rng, num_tokens, _VOCAB_SIZE)
        node = self._keeper.commit(_computed(tokens, NoPlan("no_candidates")))
        assert node is not None
        return node

    def _edited(self, template: Node) -> TokenIds:
        return edited(
            template.token_ids,
            changed=_CHANGED,
            edits=_EDITS,
            draw=lambda length: random_prompt(self._rng, length, _VOCAB_SIZE),
        )


class _Store:
    """A metadata file, filled in one transaction: one for each prompt would take most of an hour."""

    def __init__(self, path: Path, content: Change) -> None:
        with closing(Storage.open(path, identity="bench", read_only=False)) as storage:
            storage.write([content], ())
        self.tree = DeltaTree.open(path, identity="bench")
        self.tier = WeightlessTier(None)
        for segment in content.put_segments:
            self.tier.put(segment.segment_id, WeightlessKV(segment.num_bytes), 0)
        self._keeper = MemoryKeeper(self.tree, self.tier, min_tokens=1)

    def commit(self, variants: _Variants) -> float:
        """Store a new prompt as a server does after it was answered; seconds taken."""
        template, computed = variants.draw()
        self.tree.touch(template)  # as when the plan was taken
        began = time.perf_counter()
        node = self._keeper.commit(computed)
        seconds = time.perf_counter() - began
        assert node is not None
        return seconds

    def describe(self, seconds: NDArray[np.float64]) -> dict[str, float]:
        """Of all commits, and what is in the store after them."""
        return {
            **milliseconds(seconds.ravel().tolist()),
            "num_prompts": self.tree.stats().num_nodes,
            "evictions_per_commit": self._keeper.counters["evictions"] / seconds.size,
        }


def _computed(tokens: TokenIds, plan: Plan | NoPlan) -> Computed[WeightlessKV]:
    return Computed(_NAMESPACE, tokens, plan, WeightlessSequence(_RATES.bytes_per_token))
