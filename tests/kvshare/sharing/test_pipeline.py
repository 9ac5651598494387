"""Looking up a plan: it changes nothing, and whatever fails serves the request unshared."""

import threading
from dataclasses import replace
from typing import ClassVar

import pytest

from kvshare.embedded.model import EmbeddedModel
from kvshare.reasons import Reason
from kvshare.requests import SharingMode
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import LoadRate
from kvshare.telemetry import Component, FallbackReason
from tests.kvshare.sharing.prompts import replaced
from tests.kvshare.sharing.tiny_sharing import (
    FixedNominator,
    _schema,
    donor_for,
    fallbacks,
    look_up,
    prompt,
    sharing_with,
)
from vector_index import (
    IndexUnavailableError,
    Nomination,
    Nominator,
    QdrantRemoteIndex,
)


class BrokenNominator(FixedNominator):
    """Fails in a way its contract rules out."""

    async def nominate(self, *_: object, **__: object) -> Nomination:
        raise RuntimeError("SECRET: it may quote the prompt")


class UnavailableIndex(QdrantRemoteIndex):
    """A backend that is down."""

    async def search_fingerprints(self, *_: object, **__: object) -> list:  # type: ignore[type-arg]  # raises
        raise IndexUnavailableError("down")


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


@pytest.mark.parametrize(("asked", "limit"), [(None, 0.05), (9.0, 0.05), (0.01, 0.01), (0.0, 0.0)])
async def test_a_request_may_lower_the_limit_and_not_raise_it(
    model: EmbeddedModel, asked: float | None, limit: float
) -> None:
    sharing = sharing_with(FixedNominator(), model)
    wanted = prompt(400)
    donor_for(sharing, model, replaced(wanted.token_ids, (100, 104)))
    lookup = await sharing.find_plan("ns", wanted, SharingMode.APPROX, max_deviation=asked)
    assert lookup.plan.prediction is not None
    assert lookup.plan.prediction.limit == limit
    assert (lookup.plan.reason is None) == (limit > 0)


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
    """A segment that does not match its checksum is never written."""
    sharing = sharing_with(FixedNominator(), model)
    wanted = prompt(100)
    node = donor_for(sharing, model, wanted.token_ids)
    segment_id = next(iter(node.pieces)).segment_id
    segment = sharing.tier.fetch([segment_id]).segments.get(segment_id)
    assert segment is not None
    segment.k[1, 50] += 1.0
    lookup = await look_up(sharing, wanted)
    assert lookup.plan == NoPlan(Reason.KV_GONE)


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


async def test_meaning_is_searched_only_where_it_may_save_much_more(model: EmbeddedModel) -> None:
    """An embedding of tens of milliseconds is not paid for a prefill of a few."""

    class Asked(FixedNominator):
        async def nominate(self, *_: object, allow_dense: bool, **__: object) -> Nomination:  # type: ignore[override]  # narrower
            self.dense.append(allow_dense)
            return Nomination((), 0, {}, ())

        dense: ClassVar[list[bool]] = []

    nominator = Asked()
    sharing = sharing_with(nominator, model, dense_max_share=0.02)  # of 900 ms that 1,000 tokens save
    sharing.cost.observe_embedding(500, 0.01)
    sharing.cost.observe_prefill(500, 0.5)
    sharing.cost.rates = replace(sharing.cost.rates, embedding=LoadRate(0.01, 0.0))
    for length, mode in ((500, "approx"), (600, "approx"), (600, "exact")):
        await sharing.find_plan("ns", prompt(length), SharingMode(mode))
    assert nominator.dense == [False, True, False]


@pytest.mark.parametrize(("length", "thread"), [(8192, "kvshare-plan_"), (8193, "kvshare-plan-long_")])
async def test_long_prompts_are_planned_on_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch, model: EmbeddedModel, length: int, thread: str
) -> None:
    """A short prompt does not wait until a long one is planned."""
    sharing = sharing_with(FixedNominator(1), model)
    seen: list[str] = []

    def note_thread(*_: object) -> Lookup:
        seen.append(threading.current_thread().name)
        return Lookup(NoPlan(Reason.NO_CANDIDATES))

    monkeypatch.setattr(sharing, "_plan", note_thread)
    await sharing.find_plan("ns", prompt(length), SharingMode.APPROX)
    sharing.close()
    assert [name.startswith(thread) for name in seen] == [True]
