"""A sharing core over a tiny model and a nominator that is told what to find."""

from collections import Counter

import numpy as np

from delta_tree import DeltaTree, Node, TokenIds, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.tier import MemoryTier
from kvshare.reasons import Reason
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Rates
from kvshare.telemetry import Component, FallbackReason
from vector_index import (
    Candidate,
    IndexSchema,
    Nomination,
    Nominator,
    NominatorSettings,
    PromptText,
    QdrantRemoteIndex,
)

TEXT = PromptText(last_user_turn="", body="")


class FixedNominator(Nominator):
    """Nominates what it is told to: a real nominator with its decision replaced."""

    def __init__(self, *node_ids: int) -> None:
        super().__init__(_index())
        self.node_ids = node_ids

    async def nominate(self, *_: object, **__: object) -> Nomination:
        candidates = tuple(Candidate(node_id, ("fingerprint",), 1.0) for node_id in self.node_ids)
        return Nomination(candidates, 0, {}, ())


def _schema() -> IndexSchema:
    return NominatorSettings().schema(None)


def _index() -> QdrantRemoteIndex:
    return QdrantRemoteIndex(_schema(), ":memory:")


def sharing_with(
    nominator: Nominator,
    model: EmbeddedModel,
    *,
    max_bytes: int = 10**9,
    dense_max_share: float | None = None,
) -> Sharing:
    settings = load_settings()
    return Sharing(
        keeper=MemoryKeeper(
            DeltaTree.open(None, identity="test"),
            MemoryTier(max_bytes),
            min_tokens=settings.sharing.min_prompt_tokens,
        ),
        nominator=nominator,
        limits=PlannerLimits(
            sharing=settings.sharing, repair=settings.repair, dense_max_share=dense_max_share
        ),
        cost=CostModel(Rates.linear(1000.0, 2e9, bytes_per_token=model.layout.bytes_per_token)),
    )


def prompt(length: int, seed: int = 0) -> Prompt:
    tokens = np.random.default_rng(seed).integers(3, 300, length)
    return Prompt(token_ids(tokens), TEXT)


def store(
    sharing: Sharing,
    model: EmbeddedModel,
    tokens: TokenIds,
    *,
    namespace: str = "ns",
    plan: Plan | NoPlan | None = None,
) -> Node | None:
    """Store a prompt whose KV is whatever the buffer holds: only the bookkeeping is looked at."""
    kv = model.new_sequence(len(tokens))
    kv.k.zero_()
    kv.v.zero_()
    return keeper_of(sharing).store(Computed(namespace, tokens, plan or NoPlan(Reason.NO_CANDIDATES), kv))


def donor_for(sharing: Sharing, model: EmbeddedModel, tokens: TokenIds, *, namespace: str = "ns") -> Node:
    node = store(sharing, model, tokens, namespace=namespace)
    assert node is not None
    assert isinstance(sharing.nominator, FixedNominator)
    sharing.nominator.node_ids = (node.node_id,)
    return node


def fallbacks(sharing: Sharing) -> Counter[tuple[Component, FallbackReason]]:
    return sharing.telemetry.counts().fallbacks


def keeper_of(sharing: Sharing) -> MemoryKeeper[SegmentKV]:
    assert isinstance(sharing.keeper, MemoryKeeper)
    return sharing.keeper


async def look_up(sharing: Sharing, wanted: Prompt, *, namespace: str = "ns") -> Lookup:
    found = await sharing.find_plan(namespace, wanted, SharingMode.APPROX)
    sharing.note_use(found).result()
    return found
