"""Sharing fails open, keeps its books, and never lets foreign KV through."""

import threading
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from delta_tree import DeltaTree, Node, NodeId, Span, TokenIds, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.tier import MemoryTier
from kvshare.reasons import Reason
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel, Rates
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.telemetry import Component, FallbackReason
from kvshare_lab.bench.random_models import tiny_model
from vector_index import (
    Candidate,
    IndexSchema,
    IndexUnavailableError,
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


class BrokenNominator(FixedNominator):
    """Fails in a way its contract rules out."""

    async def nominate(self, *_: object, **__: object) -> Nomination:
        raise RuntimeError("SECRET: it may quote the prompt")


class UnavailableIndex(QdrantRemoteIndex):
    """A backend that is down."""

    async def search_fingerprints(self, *_: object, **__: object) -> list:  # type: ignore[type-arg]  # raises
        raise IndexUnavailableError("down")


def _schema() -> IndexSchema:
    return NominatorSettings().schema(None)


def _index() -> QdrantRemoteIndex:
    return QdrantRemoteIndex(_schema(), ":memory:")


def sharing_with(
    nominator: Nominator,
    model: EmbeddedModel,
    *,
    max_bytes: int = 10**9,
    dense_min_prefill_s: float = 0.0,
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
            sharing=settings.sharing, repair=settings.repair, dense_min_prefill_s=dense_min_prefill_s
        ),
        cost=CostModel(Rates(1000.0, 2e9, bytes_per_token=model.layout.bytes_per_token), smoothing=0.2),
    )


def prompt(length: int, seed: int = 0) -> Prompt:
    tokens = np.random.default_rng(seed).integers(3, 300, length)
    return Prompt(token_ids(tokens), TEXT)


@pytest.fixture(scope="module")
def model() -> EmbeddedModel:
    return EmbeddedModel(tiny_model("llama"), name="llama")


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


async def test_any_failure_in_the_lookup_serves_the_request_unshared(
    model: EmbeddedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Even a bug in the nominator costs a hit and a count, not a request. The log says where it is."""
    sharing = sharing_with(BrokenNominator(), model)
    lookup = await look_up(sharing, prompt(100))
    assert lookup.plan == NoPlan(Reason.LOOKUP_FAILED)
    assert fallbacks(sharing) == {(Component.SHARING, FallbackReason.ERROR): 1}
    assert "RuntimeError" in caplog.text
    assert "SECRET" not in caplog.text.replace('RuntimeError("SECRET', "")  # the line of code itself


async def test_an_index_that_is_down_is_counted_by_component(model: EmbeddedModel) -> None:
    """The nominator reports the failure; sharing counts it and goes on."""
    index = UnavailableIndex(_schema(), ":memory:")
    await index.open()
    sharing = sharing_with(Nominator(index), model)
    lookup = await look_up(sharing, prompt(100))
    assert lookup.plan == NoPlan(Reason.NO_CANDIDATES)
    assert fallbacks(sharing) == {(Component.FINGERPRINT, FallbackReason.ERROR): 1}
    await index.close()


async def test_a_foreign_candidate_is_dropped_counted_and_alarmed(
    model: EmbeddedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Should the index ever hand out another namespace's prompt, the loaded node gives it away."""
    sharing = sharing_with(FixedNominator(), model)
    wanted = prompt(100)
    donor_for(sharing, model, wanted.token_ids, namespace="theirs")
    lookup = await look_up(sharing, wanted, namespace="ours")
    assert lookup.plan == NoPlan(Reason.NO_CANDIDATES)
    assert sharing.telemetry.counts().num_isolation_denials == 1
    assert "another namespace" in caplog.text


async def test_a_donor_whose_bytes_are_gone_is_a_miss(model: EmbeddedModel) -> None:
    """The tree knows the segment, the tier does not: planned again without that donor."""
    sharing = sharing_with(FixedNominator(), model)
    wanted = prompt(100)
    node = donor_for(sharing, model, wanted.token_ids)
    sharing.tier.drop(piece.segment_id for piece in node.pieces)
    lookup = await look_up(sharing, wanted)
    assert lookup.plan == NoPlan(Reason.KV_GONE)
    assert fallbacks(sharing) == {(Component.TIER, FallbackReason.MISSING): 1}
    assert sharing.tree.get(node.node_id) is None


async def test_looking_up_changes_nothing(model: EmbeddedModel) -> None:
    """Neither the order of eviction nor a node nor the cost model: `explain` may ask as often as it likes."""
    sharing = sharing_with(FixedNominator(), model)
    wanted = prompt(200)
    donor = donor_for(sharing, model, wanted.token_ids)
    before = (sharing.tree.node(donor.node_id), sharing.cost.rates, sharing.telemetry.counts())
    for _ in range(3):
        lookup = await sharing.find_plan("ns", wanted, SharingMode.APPROX)
        assert isinstance(lookup.plan, Plan)
    assert (sharing.tree.node(donor.node_id), sharing.cost.rates, sharing.telemetry.counts()) == before
    sharing.note_use(lookup).result()
    used = sharing.tree.node(donor.node_id)
    assert (used.num_hits, used.last_used_at >= donor.last_used_at) == (1, True)


async def test_looking_up_evicts_nobody(model: EmbeddedModel) -> None:
    """A donor whose KV is gone stays until a request is served by what was found without it."""
    sharing = sharing_with(FixedNominator(), model)
    wanted = prompt(200)
    donor = donor_for(sharing, model, wanted.token_ids)
    sharing.tier.drop(donor.pieces.segment_ids)
    lookup = await sharing.find_plan("ns", wanted, SharingMode.APPROX)
    assert (lookup.plan, lookup.unreadable) == (NoPlan(Reason.KV_GONE), (donor.node_id,))
    assert sharing.tree.get(donor.node_id) is not None
    sharing.note_use(lookup).result()
    assert sharing.tree.get(donor.node_id) is None


async def test_corrupt_bytes_are_a_miss(model: EmbeddedModel) -> None:
    """A segment that does not match its checksum is never laid out."""
    sharing = sharing_with(FixedNominator(), model)
    wanted = prompt(100)
    node = donor_for(sharing, model, wanted.token_ids)
    segment_id = next(iter(node.pieces)).segment_id
    segment = sharing.tier.fetch([segment_id]).segments.get(segment_id)
    assert segment is not None
    segment.k[1, 50] += 1.0
    lookup = await look_up(sharing, wanted)
    assert lookup.plan == NoPlan(Reason.KV_GONE)


async def test_a_plan_is_stored_as_pieces_over_the_donors_segments(model: EmbeddedModel) -> None:
    """Only what was computed costs bytes; the rest of the node points to the donor's segment."""
    sharing = sharing_with(FixedNominator(), model)
    base = prompt(400)
    donor = donor_for(sharing, model, base.token_ids)
    changed = np.array(base.token_ids)
    changed[100:110] = 299
    wanted = Prompt(token_ids(changed), TEXT)
    lookup = await look_up(sharing, wanted)
    assert isinstance(lookup.plan, Plan)
    before = sharing.tier.num_bytes
    node = store(sharing, model, wanted.token_ids, plan=lookup.plan)
    assert node is not None
    assert sharing.tree.ancestors(node.node_id) == (donor.node_id,)
    # Behind the edit, up to the first copy, everything was computed after exact KV: it is exact.
    assert node.exact_length == lookup.plan.first_approximate
    grown = sharing.tier.num_bytes - before
    assert grown == lookup.plan.num_computed * model.layout.bytes_per_token
    generations = [sharing.tree.segment(piece.segment_id).generation for piece in node.pieces]
    assert generations == [0, 0, 0, 1]  # prefix, edit and window, copy, tail
    assert sharing.tree.stats().num_bytes == sharing.tier.num_bytes


async def test_the_same_prompt_twice_is_stored_once(model: EmbeddedModel) -> None:
    """Its second KV is let go."""
    sharing = sharing_with(FixedNominator(), model)
    tokens = prompt(100).token_ids
    assert store(sharing, model, tokens) is not None
    assert store(sharing, model, tokens) is None
    assert sharing.tree.stats().num_nodes == 1
    assert isinstance(sharing.tier, MemoryTier)
    assert len(sharing.tier) == 1
    assert sharing.tier.num_bytes == 100 * model.layout.bytes_per_token


async def test_a_donor_in_use_is_not_evicted(model: EmbeddedModel) -> None:
    """While a request holds its donors, room is made elsewhere or not at all."""
    bytes_per_token = model.layout.bytes_per_token
    sharing = sharing_with(FixedNominator(), model, max_bytes=250 * bytes_per_token)
    wanted = prompt(100)
    donor = donor_for(sharing, model, wanted.token_ids)
    lookup = await look_up(sharing, wanted)
    keeper_of(sharing).hold(lookup.plan)
    assert store(sharing, model, prompt(200, seed=1).token_ids) is None
    keeper_of(sharing).release(lookup.plan)
    assert sharing.tree.node(donor.node_id).num_tokens == 100
    assert store(sharing, model, prompt(200, seed=1).token_ids) is not None
    assert sharing.tree.node(donor.node_id).num_tokens <= 50


async def test_a_sequence_on_an_evicted_donor_is_not_stored(model: EmbeddedModel) -> None:
    """An administrator may evict a donor while a recipient runs: that recipient is just not kept."""
    sharing = sharing_with(FixedNominator(), model)
    base = prompt(400)
    donor = donor_for(sharing, model, base.token_ids)
    changed = np.array(base.token_ids)
    changed[100:110] = 299
    wanted = Prompt(token_ids(changed), TEXT)
    lookup = await look_up(sharing, wanted)
    sharing.tier.drop(sharing.tree.evict(donor.node_id).freed_segments)
    assert store(sharing, model, wanted.token_ids, plan=lookup.plan) is None
    assert sharing.tree.stats().num_nodes == 0
    assert sharing.tier.num_bytes == 0
    assert fallbacks(sharing) == {(Component.COMMIT, FallbackReason.DONOR_GONE): 1}


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
async def test_an_exact_prefix_of_an_evicted_donor_is_kept_only_where_all_of_it_was_laid_out(
    family: str,
) -> None:
    """Layers with a window lack what nobody was going to see; the rest of their slots is no KV."""
    model = EmbeddedModel(tiny_model(family), name=family)
    sharing = sharing_with(FixedNominator(), model)
    base = prompt(200)
    donor = donor_for(sharing, model, base.token_ids)
    wanted = token_ids(np.concatenate([base.token_ids[:150], prompt(50, seed=3).token_ids]))
    lookup = await look_up(sharing, Prompt(wanted, TEXT))
    assert isinstance(lookup.plan, Plan)
    assert lookup.plan.exact_length == 150
    kv = model.new_sequence(200)
    for plane in kv.planes:
        plane.fill_(float("nan"))
    kv.write_copies(lookup.plan.copies, lookup.segments, computed=lookup.plan.may_compute)
    model.compute(PartialPass(kv, (Span(150, 200),)), wanted[150:])
    sharing.tier.drop(sharing.tree.evict(donor.node_id).freed_segments)
    node = keeper_of(sharing).store(Computed("ns", wanted, lookup.plan, kv))
    if family == "llama":
        assert node is not None
        assert not kv.k[:, :200].isnan().any()
    else:
        assert node is None
        assert fallbacks(sharing) == {(Component.COMMIT, FallbackReason.DONOR_GONE): 1}


async def test_a_prompt_evicted_while_it_is_indexed_does_not_come_back(model: EmbeddedModel) -> None:
    """Embedding takes its time; what was evicted meanwhile leaves the index again."""

    class SlowNominator(FixedNominator):
        async def remember(self, *arguments: object, **more: object) -> tuple[()]:
            sharing.tier.drop(sharing.tree.evict(node.node_id).freed_segments)
            self.events.append("remember")
            return ()

        async def forget(self, namespace: str, prompt_ids: object) -> tuple[()]:
            self.events.append(f"forget {prompt_ids == [node.node_id]}")
            return ()

        events: ClassVar[list[str]] = []

    nominator = SlowNominator()
    sharing = sharing_with(nominator, model)
    kept = store(sharing, model, prompt(100).token_ids)
    assert kept is not None
    node = kept
    await sharing.remember(node, TEXT)
    assert nominator.events == ["remember", "forget True"]


async def test_the_index_hears_of_a_prompt_that_lost_its_end(model: EmbeddedModel) -> None:
    """It is found by what is left of it, also where its text was still waiting to be embedded."""
    remembered: list[tuple[int, object]] = []

    class Recorder(FixedNominator):
        async def remember(
            self, prompt_id: int, namespace: str, token_ids: TokenIds, prompt_text: PromptText | None = None
        ) -> tuple[()]:
            remembered.append((len(token_ids), prompt_text))
            return ()

    sharing = sharing_with(Recorder(), model, max_bytes=1000 * model.layout.bytes_per_token)
    node = store(sharing, model, prompt(900).token_ids)
    assert node is not None
    assert store(sharing, model, prompt(200, seed=1).token_ids) is not None
    assert sharing.tree.node(node.node_id).num_tokens < 900
    await sharing.forget_evicted()
    await sharing.remember(node, TEXT)
    assert remembered == 2 * [(sharing.tree.node(node.node_id).num_tokens, None)]


async def test_a_prompt_that_loses_its_end_while_it_is_embedded_is_indexed_short(
    model: EmbeddedModel,
) -> None:
    """What the index got last is what the tree has."""
    remembered: list[tuple[int, object]] = []

    class Slow(FixedNominator):
        async def remember(
            self, prompt_id: int, namespace: str, token_ids: TokenIds, prompt_text: PromptText | None = None
        ) -> tuple[()]:
            remembered.append((len(token_ids), prompt_text))
            if prompt_text is not None:
                sharing.tree.shorten(NodeId(prompt_id), 256)
            return ()

    sharing = sharing_with(Slow(), model)
    node = store(sharing, model, prompt(900).token_ids)
    assert node is not None
    await sharing.remember(node, TEXT)
    assert remembered == [(900, TEXT), (256, None)]


async def test_an_index_entry_without_a_node_is_taken_out(model: EmbeddedModel) -> None:
    """Entries that nobody knows would crowd out living donors."""
    sharing = sharing_with(FixedNominator(77), model)
    assert (await look_up(sharing, prompt(100))).plan == NoPlan(Reason.NO_CANDIDATES)
    assert sharing.keeper.take_evicted() == [("ns", 77)]


async def test_only_what_is_really_unreadable_is_discarded(model: EmbeddedModel) -> None:
    """A donor that was stored anew between planning and fetching is healthy, and pinned ones stay."""
    sharing = sharing_with(FixedNominator(), model)
    node = donor_for(sharing, model, prompt(100).token_ids)
    sharing.tree.pin(node.node_id)
    sharing.keeper.discard_unreadable([node.node_id])
    assert sharing.tree.node(node.node_id).pinned
    sharing.tier.drop(node.pieces.segment_ids)
    sharing.keeper.discard_unreadable([node.node_id])
    assert sharing.tree.get(node.node_id) is None


async def test_nobody_is_evicted_for_a_prompt_that_would_not_fit_anyway(model: EmbeddedModel) -> None:
    """With most of the memory pinned, a large prompt is refused and the small ones stay."""
    bytes_per_token = model.layout.bytes_per_token
    sharing = sharing_with(FixedNominator(), model, max_bytes=300 * bytes_per_token)
    pinned = store(sharing, model, prompt(200, seed=1).token_ids)
    small = store(sharing, model, prompt(50, seed=2).token_ids)
    assert pinned is not None
    assert small is not None
    sharing.tree.pin(pinned.node_id)
    assert store(sharing, model, prompt(150, seed=3).token_ids) is None
    assert sharing.tree.get(small.node_id) is not None
    assert fallbacks(sharing) == {(Component.COMMIT, FallbackReason.NO_ROOM): 1}


async def test_exact_kv_is_kept_though_its_donor_is_gone(model: EmbeddedModel) -> None:
    """A prefix taken from an evicted donor is in the slots, and exact: the prompt is stored whole."""
    sharing = sharing_with(FixedNominator(), model)
    base = prompt(100)
    donor = donor_for(sharing, model, base.token_ids)
    longer = token_ids(np.concatenate([base.token_ids, prompt(50, seed=1).token_ids]))
    lookup = await look_up(sharing, Prompt(longer, TEXT))
    assert isinstance(lookup.plan, Plan)
    assert lookup.plan.decision == "exact"
    sharing.tier.drop(sharing.tree.evict(donor.node_id).freed_segments)
    node = store(sharing, model, longer, plan=lookup.plan)
    assert node is not None
    assert node.exact_length == 150
    assert sharing.tier.num_bytes == 150 * model.layout.bytes_per_token


async def test_meaning_is_searched_only_where_prefill_takes_long(model: EmbeddedModel) -> None:
    """An embedding of tens of milliseconds is not paid for a prefill of a few."""

    class Asked(FixedNominator):
        async def nominate(self, *_: object, allow_dense: bool) -> Nomination:  # type: ignore[override]  # narrower
            self.dense.append(allow_dense)
            return Nomination((), 0, {}, ())

        dense: ClassVar[list[bool]] = []

    nominator = Asked()
    sharing = sharing_with(nominator, model, dense_min_prefill_s=0.5)  # 500 tokens at the prior rate
    for length, mode in ((499, "approx"), (500, "approx"), (500, "exact")):
        await sharing.find_plan("ns", prompt(length), SharingMode(mode))
    assert nominator.dense == [False, True, False]


@pytest.mark.parametrize(("length", "thread"), [(8192, "kvshare-plan_"), (8193, "kvshare-plan-long_")])
async def test_long_prompts_are_planned_on_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch, model: EmbeddedModel, length: int, thread: str
) -> None:
    """A short prompt does not wait until a long one is planned."""
    sharing = sharing_with(FixedNominator(), model)
    seen: list[str] = []

    def note_thread(*_: object) -> Lookup:
        seen.append(threading.current_thread().name)
        return Lookup(NoPlan(Reason.NO_CANDIDATES))

    monkeypatch.setattr(sharing, "_plan", note_thread)
    await sharing.find_plan("ns", prompt(length), SharingMode.APPROX)
    sharing.close()
    assert [name.startswith(thread) for name in seen] == [True]
