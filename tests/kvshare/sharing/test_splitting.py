"""A part of a prompt is read from disk while the rest is computed: how plans are split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import (
    DeltaTree,
    Node,
    NodeDraft,
    Piece,
    PieceTable,
    Segment,
    SegmentId,
    Span,
    TokenIds,
    gaps,
    merge,
    new_segment_id,
)
from kvshare.kv.tier import Fetched
from kvshare.reasons import Reason
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.fetching import Fetching
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan, RepairOrder
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import DISK, MEMORY, LoadRate, MinSaved, PrefillWork, Queue, Rates
from kvshare.sharing.splitting import OF_STEPS, _order_within, without_late
from kvshare.telemetry import Telemetry
from tests.kvshare.sharing.prompts import prompt, replaced

SIZE, SEGMENT = 6000, 200
TOKENS_PER_S = 1000.0
FULL_S = SIZE / TOKENS_PER_S
SETTINGS = load_settings()
LIMITS = PlannerLimits(
    sharing=SETTINGS.sharing.model_copy(update={"max_risk": 1.0}), repair=SETTINGS.repair, can_probe=True
)
DONOR = prompt(SIZE)
EDITED = replaced(DONOR, (1000, 1010), (3000, 3010), (5000, 5010))
LONGER = replaced(DONOR, (5500, SIZE))


class NoTier:
    """`Fetching` asks it for nothing but where segments lie."""

    def __init__(self, on_disk: frozenset[int]) -> None:
        self.on_disk = on_disk


def stored(tree: DeltaTree, tokens: TokenIds) -> Node:
    """A node whose KV is segments of `SEGMENT` tokens."""
    segments = [
        Segment(new_segment_id(), "ns", start, SEGMENT, 0, 1000 * SEGMENT, 0)
        for start in range(0, len(tokens), SEGMENT)
    ]
    pieces = PieceTable(Piece(each.segment_id, 0, SEGMENT) for each in segments)
    return tree.insert(NodeDraft("ns", tokens, None, pieces, tuple(segments), len(tokens))).node


def rates(node: Node, tokens_per_s: float, *, ahead: bool = True, in_blocks: bool = False) -> Rates:
    """A disk that reads so many tokens a second, with all of the node on it only."""
    ids = frozenset(node.pieces.segment_ids)
    return replace(
        Rates.linear(TOKENS_PER_S, 1e12, bytes_per_token=1000, num_extra_passes=1),
        loads=MappingProxyType(
            {MEMORY: LoadRate(0.0, 1e-12), DISK: LoadRate(0.0, 1 / (1000 * tokens_per_s))}
        ),
        computes_ahead=ahead,
        queue=Queue(on_disk=ids, in_blocks=ids if in_blocks else frozenset()),
    )


def plan_for(tree: DeltaTree, tokens: TokenIds, node: Node, now: Rates) -> Plan | NoPlan:
    return make_plan(tokens, [node], tree.segment, approximate=True, limits=LIMITS, rates=now)


def assert_whole(plan: Plan) -> None:
    """Every position has one source, and every count is of it."""
    targets = [copy.target for copy in plan.copies]
    covered = sorted([*targets, *plan.placeholders])
    assert (covered[0].start, covered[-1].end) == (0, SIZE)
    assert all(left.end == right.start for left, right in pairwise(covered))
    assert plan.placeholders == gaps(targets, SIZE)
    assert Lookup(plan).report(SIZE).num_prompt_tokens == SIZE
    counts = plan.num_exact, plan.num_copied, plan.num_recomputed, plan.num_repaired
    assert all(count >= 0 for count in counts)
    if plan.num_ahead:
        assert plan.placeholders[0] == Span(0, plan.num_ahead)


def test_copies_that_follow_reads_in_parts_cost_their_last_part() -> None:
    """As a pipeline of equal parts: the slower of both, and one part of the other."""
    for read_s, copy_s in ((4.0, 1.0), (1.0, 4.0), (2.0, 2.0)):
        loads = {MEMORY: LoadRate(0.5, copy_s), DISK: LoadRate(0.25, read_s)}
        now = replace(Rates.linear(1.0, 1.0, bytes_per_token=1), loads=MappingProxyType(loads))
        work = PrefillWork(10, 0.0, num_reused=8, num_on_disk=6)
        for parts in (1, 2, 4):
            found = replace(now, read_parts=parts).estimate(18, work)
            together = max(6 * read_s + 6 * copy_s / parts, 6 * read_s / parts + 6 * copy_s)
            assert found.load_s == pytest.approx(0.75 + 2 * copy_s + together, abs=0.25)
            assert replace(now, read_parts=parts).disk_s(0) == 0


def test_what_is_copied_meanwhile_lets_more_be_read(tree: DeltaTree) -> None:
    """Where copies are slow; and the plan is faster than the same in one part."""
    node = stored(tree, DONOR)
    one = rates(node, TOKENS_PER_S)
    slow = {**one.loads, MEMORY: LoadRate(0.0, 0.5 * one.loads[DISK].byte_s)}
    one = replace(one, loads=MappingProxyType(slow))
    alone, in_parts = (plan_for(tree, EDITED, node, replace(one, read_parts=parts)) for parts in (1, 4))
    assert isinstance(alone, Plan)
    assert isinstance(in_parts, Plan)
    assert in_parts.num_ahead < alone.num_ahead
    assert in_parts.estimate.shared_s < alone.estimate.shared_s


@pytest.mark.parametrize("tokens", [EDITED, LONGER], ids=["edited", "exact"])
@pytest.mark.parametrize("speed", [0.25, 0.5, 1.0])
def test_a_slow_disk_and_computing_share_a_prompt(tree: DeltaTree, tokens: TokenIds, speed: float) -> None:
    """Each does its part at its own rate, so both together are faster than one; about as fast as can be."""
    node = stored(tree, DONOR)
    plan = plan_for(tree, tokens, node, rates(node, speed * TOKENS_PER_S))
    assert isinstance(plan, Plan)
    assert_whole(plan)
    best_s = FULL_S / (1 + speed)
    assert best_s * 0.9 < plan.estimate.shared_s < best_s + 1.5 * SEGMENT / TOKENS_PER_S + 0.7
    assert plan.estimate.shared_s < 0.95 * FULL_S
    assert plan.decision == ("approx" if tokens is EDITED else "exact")


def test_a_fast_disk_reads_all(tree: DeltaTree) -> None:
    """Computing even the first segment would take longer."""
    node = stored(tree, DONOR)
    plan = plan_for(tree, EDITED, node, rates(node, 1000 * TOKENS_PER_S))
    assert isinstance(plan, Plan)
    assert (plan.num_ahead, plan.exact_length) == (0, 1000)
    assert_whole(plan)


def test_an_engine_that_reads_first_refuses_a_slow_disk(tree: DeltaTree) -> None:
    """It would only wait."""
    node = stored(tree, DONOR)
    plan = plan_for(tree, EDITED, node, rates(node, 0.5 * TOKENS_PER_S, ahead=False))
    assert isinstance(plan, NoPlan)
    assert plan.reason is Reason.DOES_NOT_PAY


def test_what_lies_in_blocks_is_not_read(tree: DeltaTree) -> None:
    """So it is copied, however slow the disk is."""
    node = stored(tree, DONOR)
    plan = plan_for(tree, EDITED, node, rates(node, 0.5 * TOKENS_PER_S, in_blocks=True))
    assert isinstance(plan, Plan)
    assert plan.num_ahead == 0
    assert plan.estimate.shared_s < 0.2 * FULL_S


@given(speed=st.floats(0.001, 1000.0), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_split_plan_is_never_slower(speed: float, seed: int) -> None:
    """Than the whole plan, than computing, or by more than a twentieth than the better of reading or not."""
    tree = DeltaTree.open(None, identity="test")
    node = stored(tree, DONOR)
    start = 200 + 500 * seed
    tokens = replaced(DONOR, (start, start + 20))
    split, whole = (
        plan_for(tree, tokens, node, rates(node, speed * TOKENS_PER_S, ahead=ahead))
        for ahead in (True, False)
    )
    if isinstance(whole, Plan):
        assert isinstance(split, Plan)
        assert split.estimate.shared_s <= whole.estimate.shared_s + 1e-9
    if isinstance(split, Plan):
        assert_whole(split)
        assert split.estimate.shared_s < FULL_S


def test_a_late_read_costs_little(tree: DeltaTree) -> None:
    """What is computed meanwhile is no loss, so the disk is waited for a fiftieth of a prefill longer than
    that takes, or than reading was planned to.
    """
    node = stored(tree, DONOR)
    now = rates(node, 0.5 * TOKENS_PER_S)
    plan = plan_for(tree, EDITED, node, now)
    assert isinstance(plan, Plan)
    tier = NoTier(frozenset(node.pieces.segment_ids))
    fetching = Fetching(tier, CostModel(now, learns=False), Telemetry())  # type: ignore[arg-type]  # asks for places
    planned_s = (
        max(OF_STEPS * plan.num_ahead, plan.num_in(frozenset(node.pieces.segment_ids)) / 0.5) / TOKENS_PER_S
    )
    assert planned_s < fetching.patience_s(plan, MinSaved()) <= planned_s + 0.021 * FULL_S


def test_repairs_are_chosen_in_what_is_copied() -> None:
    """The stretches before the place are computed anyway."""
    order = RepairOrder((Span(100, 200), Span(300, 400)), (150, 310, 390), 120)
    assert _order_within([Span(350, 400)], order) == RepairOrder((Span(350, 400),), (390,), 50)
    assert _order_within([Span(50, 400)], order) == order
    assert _order_within([Span(200, 300)], order) is None
    assert _order_within([Span(0, 400)], None) is None
    parts = _order_within([Span(100, 120), Span(140, 151)], order)
    assert parts == RepairOrder((Span(100, 120), Span(140, 151)), (150,), 31)


@given(late=st.sets(st.integers(0, SIZE // SEGMENT - 1)), speed=st.floats(0.1, 5.0))
@settings(max_examples=40, deadline=None)
def test_what_was_read_too_late_is_computed(late: set[int], speed: float) -> None:
    """Every position still has one source; nothing is copied from what is late, and repairs are of copies."""
    tree = DeltaTree.open(None, identity="test")
    node = stored(tree, DONOR)
    plan = plan_for(tree, EDITED, node, rates(node, speed * TOKENS_PER_S))
    assert isinstance(plan, Plan)
    ids = [piece.segment_id for piece in node.pieces]
    gone = {ids[number] for number in late}
    found = without_late(plan, gone)
    if not gone & {copy.segment_id for copy in plan.copies}:
        assert found is plan
        return
    assert found.reason is Reason.KV_LATE
    if isinstance(found, NoPlan):
        assert gone >= {copy.segment_id for copy in plan.copies}
        return
    assert found.placeholders[0].end >= plan.num_ahead
    assert_whole(replace(found, num_ahead=0))
    assert not gone & {copy.segment_id for copy in found.copies}
    assert found.num_exact + found.num_copied + found.num_computed == SIZE
    if found.order is not None:
        assert found.order.num_tokens <= sum(map(len, found.order.stretches))
        copied = merge(copy.target for copy in found.copies)
        for stretch in found.order.stretches:
            assert any(span.start <= stretch.start and stretch.end <= span.end for span in copied)


class _SlowTier(NoTier):
    """Whose reads are late; `progress` bytes of them came."""

    def __init__(self, on_disk: frozenset[int], progress: int, *, has_pace: bool) -> None:
        super().__init__(on_disk)
        self._progress, self._has_pace = progress, has_pace

    def fetch(self, segment_ids: Iterable[SegmentId], *, within_s: float, doubt_s: float) -> Fetched:
        late = frozenset(segment_ids)
        return Fetched({}, frozenset(), late, self._progress, 2.0, is_slow=True, has_pace=self._has_pace)


@pytest.mark.parametrize(
    ("progress", "has_pace", "seconds"),
    [(1_000_000, True, 8.0), (0, True, 8.0), (0, False, 2.0)],
    ids=["a quarter came", "nothing came", "not known what came"],
)
def test_a_late_read_teaches_what_is_known(
    tree: DeltaTree, progress: int, has_pace: bool, seconds: float
) -> None:
    """Of a disk its pace, of nothing the least that counts, of a store elsewhere that it takes longer."""
    node = stored(tree, DONOR)
    now = rates(node, 0.5 * TOKENS_PER_S)
    plan = plan_for(tree, EDITED, node, now)
    assert isinstance(plan, Plan)
    cost, learned = CostModel(now, learns=False), []
    num_bytes = 1000 * plan.num_in(frozenset(node.pieces.segment_ids))
    tier = _SlowTier(frozenset(node.pieces.segment_ids), progress and num_bytes // 4, has_pace=has_pace)
    with patch.object(cost, "observe_load", lambda *given, **where: learned.append((given, where))):
        Fetching(tier, cost, Telemetry()).fetch(plan, MinSaved(), {"fetch": 0.0})  # type: ignore[arg-type]
    (((told, took), where),) = learned
    assert (told, where) == (num_bytes, {"place": DISK, "is_late": True})
    expected = 2.0 * num_bytes / (1 << 20) if has_pace and not progress else seconds
    assert took == pytest.approx(expected, rel=0.01)


def test_a_late_read_of_what_was_in_memory_teaches_nothing(tree: DeltaTree) -> None:
    """A segment that leaves memory, or is damaged there, after the plan was made."""
    node = stored(tree, DONOR)
    now = rates(node, 0.5 * TOKENS_PER_S)
    plan = plan_for(tree, EDITED, node, now)
    assert isinstance(plan, Plan)
    cost = CostModel(now, learns=False)
    with patch.object(cost, "observe_load") as observed:
        tier = _SlowTier(frozenset(), 0, has_pace=True)
        Fetching(tier, cost, Telemetry()).fetch(plan, MinSaved(), {"fetch": 0.0})  # type: ignore[arg-type]
    assert not observed.called


def test_what_is_computed_ahead_is_no_difference(tree: DeltaTree) -> None:
    """By the first difference operators find the line that breaks their prefix."""
    node = stored(tree, DONOR)
    plan = plan_for(tree, EDITED, node, rates(node, 0.5 * TOKENS_PER_S))
    assert isinstance(plan, Plan)
    assert plan.num_ahead
    assert Lookup(plan).report(SIZE).first_difference == plan.exact_length == 1000
