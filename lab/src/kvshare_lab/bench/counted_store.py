"""
A store whose KV is only counted, for the benchmark of planning: the server's own tree, keeper,
index and sharing core, without any model. Also prompts to fill it with: variants of some templates.
"""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from delta_tree import DeltaTree, Node, TokenIds
from kvshare.replay.policies.weightless import UNLIMITED, WeightlessSequence, WeightlessTier
from kvshare.settings import load_settings
from kvshare.sharing.calibration import of_default_model
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import Rates
from kvshare_lab.bench.harness import edited, random_prompt
from vector_index import Nominator, NominatorSettings, QdrantEdgeIndex, TextEmbedder

NAMESPACE = "bench"
RATES = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e9, bytes_per_token=1024)
_NO_DONOR = NoPlan()
_VOCAB_SIZE = 32_000
_CHANGED, _EDITS = 0.1, 5


class CountedStore:
    """A tree in memory, and the keeper that stores prompts in it, without a limit."""

    def __init__(self) -> None:
        self.tree = DeltaTree.open(None, identity="bench")
        self.tier = WeightlessTier(UNLIMITED)
        self.keeper = MemoryKeeper(self.tree, self.tier, min_tokens=1)
        limits = PlannerLimits.from_settings(load_settings(), can_probe=True)
        self.limits = replace(limits, calibration=of_default_model())

    def plan(self, tokens: TokenIds, base: Node) -> Plan | NoPlan:
        """The plan for a prompt with a single donor."""
        return make_plan(tokens, [base], self.tree.segment, approximate=True, limits=self.limits, rates=RATES)

    def store(self, tokens: TokenIds, plan: Plan | NoPlan = _NO_DONOR) -> Node:
        """Store a prompt as an engine does: its donor's pieces where the plan copies, else new segments."""
        kv = WeightlessSequence(RATES.bytes_per_token)
        node = self.keeper.store(Computed(NAMESPACE, tokens, plan, kv))
        assert node is not None
        return node

    @asynccontextmanager
    async def sharing(
        self, settings: NominatorSettings, embedder: TextEmbedder | None = None
    ) -> AsyncIterator[Sharing]:
        """The sharing core over this store, with a new index in a temporary folder."""
        with tempfile.TemporaryDirectory() as folder:
            index = QdrantEdgeIndex(settings.schema(embedder), Path(folder))
            await index.open()
            nominator = Nominator(index, embedder=embedder, settings=settings)
            cost = CostModel(RATES, learns=False)
            core = Sharing(keeper=self.keeper, nominator=nominator, limits=self.limits, cost=cost)
            try:
                yield core
            finally:
                core.close()
                nominator.close()
                await index.close()


class Variant(NamedTuple):
    """A new prompt, the number of its template and the plan over it."""

    number: int
    tokens: TokenIds
    plan: Plan | NoPlan


class Variants:
    """Prompts that each differ from a stored template: always in the same places, so they have one plan."""

    def __init__(
        self, rng: np.random.Generator, store: CountedStore, *, num_templates: int, num_tokens: int
    ) -> None:
        self._rng = rng
        draw = partial(random_prompt, rng, vocab_size=_VOCAB_SIZE)
        self._edited = partial(edited, changed=_CHANGED, edits=_EDITS, draw=draw)
        self.templates = [store.store(draw(num_tokens)) for _ in range(num_templates)]
        self._plans = [store.plan(self._edited(each.token_ids), each) for each in self.templates]

    def draw(self) -> Variant:
        number = int(self._rng.integers(len(self.templates)))
        return Variant(number, self._edited(self.templates[number].token_ids), self._plans[number])


def nomination_s(lookup: Lookup) -> float:
    """Seconds to find candidates: all stages but planning and loading."""
    return sum(value for stage, value in lookup.stage_seconds.items() if stage not in ("plan", "fetch"))
