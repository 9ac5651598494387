"""Plans whose KV is on disk: it is read where that pays, and given up where it is late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from delta_tree import DeltaTree, Node, TokenIds, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.sequence import SegmentKV
from kvshare.reasons import Reason
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import DISK, MEMORY, LoadRate, Rates
from kvshare.telemetry import Component, FallbackReason
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.kv_object import ObjectForm
from kvshare.tiers.tier_stack import TierStack
from kvshare_lab.bench.throttled import ThrottledFiles
from tests.kvshare.sharing.tiny_sharing import FixedNominator, look_up, prompt, store
from tests.kvshare.tiers.faulty_files import WaitingFiles

NUM_TOKENS, FULL_S = 400, 40.0  # by the rates: no machine is too slow for a read in time
SLOW, FAST = LoadRate(0.0, 1.0), LoadRate(0.0, 1e-12)


@dataclass
class Stored:
    """A sharing core over memory and disk."""

    sharing: Sharing
    stack: TierStack
    files: WaitingFiles
    model: EmbeddedModel

    def put(self, tokens: TokenIds, *, to_disk: bool) -> Node:
        """Store a prompt, and leave it on disk alone or in memory, too."""
        node = store(self.sharing, self.model, tokens)
        assert node is not None
        until = time.monotonic() + 120
        while self.stack.status()[1].num_due_bytes:
            assert time.monotonic() < until
            time.sleep(0.002)
        if to_disk:
            self.stack.release(node.pieces.segment_ids)
        assert all((entry in self.stack.on_disk) is to_disk for entry in node.pieces.segment_ids)
        nominator = self.sharing.nominator
        assert isinstance(nominator, FixedNominator)
        nominator.node_ids = (*nominator.node_ids, node.node_id)
        return node

    @property
    def num_read(self) -> int:
        return self.stack.status()[1].num_hits


@contextmanager
def stored(folder: Path, model: EmbeddedModel, disk: LoadRate, *, learns: bool = False) -> Iterator[Stored]:
    rates = replace(
        Rates.linear(NUM_TOKENS / FULL_S, 1e12, bytes_per_token=model.layout.bytes_per_token),
        loads=MappingProxyType({MEMORY: FAST, DISK: disk}),
    )
    files, settings = WaitingFiles(), load_settings()
    tier = DiskTier(folder, ObjectForm.of(model.layout, ()), max_bytes=10**9, keep_free_bytes=0, files=files)
    tier.open()
    stack = TierStack(10**9, tier, write_bytes_per_s=1e12)
    keeper: MemoryKeeper[SegmentKV] = MemoryKeeper(
        DeltaTree.open(None, identity="test"), stack, min_tokens=32
    )
    sharing = Sharing(
        keeper=keeper,
        nominator=FixedNominator(),
        limits=PlannerLimits(sharing=settings.sharing, repair=settings.repair),
        cost=CostModel(rates, learns=learns),
    )
    try:
        yield Stored(sharing, stack, files, model)
    finally:
        files.may_read.set()
        sharing.close()
        stack.close()


def copied_from(plan: Plan | NoPlan) -> tuple[int, ...]:
    return plan.donors if isinstance(plan, Plan) else ()


def longer(tokens: TokenIds, *, num_equal: int, seed: int) -> TokenIds:
    """Another prompt with the same beginning."""
    rest = np.random.default_rng(seed).integers(3, 300, NUM_TOKENS - num_equal)
    return token_ids(np.concatenate([tokens[:num_equal], rest]))


async def test_a_disk_that_is_faster_than_computing_is_read(tmp_path: Path, model: EmbeddedModel) -> None:
    """And its rate is learned from that."""
    with stored(tmp_path, model, FAST, learns=True) as found:
        wanted = prompt(NUM_TOKENS)
        node = found.put(wanted.token_ids, to_disk=True)
        lookup = await look_up(found.sharing, wanted)
        assert copied_from(lookup.plan) == (node.node_id,)
        assert lookup.segments.keys() == node.pieces.segment_ids
        assert found.num_read == len(node.pieces.segment_ids)
        assert DISK in found.sharing.cost.measured


async def test_a_disk_that_is_slower_than_computing_is_not_read(tmp_path: Path, model: EmbeddedModel) -> None:
    """The prompt is computed at once."""
    with stored(tmp_path, model, SLOW) as found:
        wanted = prompt(NUM_TOKENS)
        found.put(wanted.token_ids, to_disk=True)
        lookup = await look_up(found.sharing, wanted)
        assert isinstance(lookup.plan, NoPlan)
        assert lookup.plan.reason is Reason.DOES_NOT_PAY
        assert found.num_read == 0


async def test_what_is_in_memory_is_used_where_the_disk_is_too_slow(
    tmp_path: Path, model: EmbeddedModel
) -> None:
    """A donor on disk has more of the prompt, but one in memory is faster."""
    with stored(tmp_path, model, SLOW) as found:
        wanted = prompt(NUM_TOKENS)
        found.put(wanted.token_ids, to_disk=True)
        near = found.put(longer(wanted.token_ids, num_equal=200, seed=1), to_disk=False)
        lookup = await look_up(found.sharing, wanted)
        assert copied_from(lookup.plan) == (near.node_id,)
        assert found.num_read == 0


async def test_a_late_read_is_given_up(tmp_path: Path, model: EmbeddedModel) -> None:
    """The prompt is computed, its donor stays, and is in memory once the read is done."""
    with stored(tmp_path, model, FAST) as found:
        wanted = prompt(NUM_TOKENS)
        node = found.put(wanted.token_ids, to_disk=True)
        found.files.may_read.clear()
        lookup = await look_up(found.sharing, wanted)
        assert isinstance(lookup.plan, NoPlan)
        assert lookup.plan.reason is Reason.KV_LATE
        assert found.sharing.telemetry.counts().fallbacks[Component.TIER, FallbackReason.TIMEOUT] == 1
        assert found.sharing.tree.get(node.node_id) is not None
        found.files.may_read.set()
        until = time.monotonic() + 120
        while any(entry in found.stack.on_disk for entry in node.pieces.segment_ids):
            assert time.monotonic() < until
            await asyncio.sleep(0.002)
        assert copied_from((await look_up(found.sharing, wanted)).plan) == (node.node_id,)


async def test_a_late_read_leaves_what_is_in_memory(tmp_path: Path, model: EmbeddedModel) -> None:
    """The plan is made again, without what is on disk."""
    with stored(tmp_path, model, FAST) as found:
        wanted = prompt(NUM_TOKENS)
        found.put(wanted.token_ids, to_disk=True)
        near = found.put(longer(wanted.token_ids, num_equal=200, seed=1), to_disk=False)
        found.files.may_read.clear()
        assert copied_from((await look_up(found.sharing, wanted)).plan) == (near.node_id,)


async def test_a_disk_that_was_late_is_not_waited_for_again(tmp_path: Path, model: EmbeddedModel) -> None:
    """Its rate is learned from what it did not read in time, so that the next plan is refused."""
    with stored(tmp_path, model, FAST, learns=True) as found:
        first, second = prompt(NUM_TOKENS, seed=1), prompt(NUM_TOKENS, seed=2)
        for wanted in (first, second):
            found.put(wanted.token_ids, to_disk=True)
        found.files.may_read.clear()
        assert isinstance((await look_up(found.sharing, first)).plan, NoPlan)
        rate = found.sharing.cost.rates.loads[DISK]
        assert rate.seconds(NUM_TOKENS * model.layout.bytes_per_token) > 0.1  # s, of 2 % of 40


async def test_a_disk_at_half_of_break_even_is_given_up_at_once(tmp_path: Path, model: EmbeddedModel) -> None:
    """It was fast before. Its pace is seen long before a segment is read, and the next plan is refused."""
    num_bytes = NUM_TOKENS * model.layout.bytes_per_token
    with stored(tmp_path, model, FAST, learns=True) as found:
        first, second = prompt(NUM_TOKENS, seed=1), prompt(NUM_TOKENS, seed=2)
        for wanted in (first, second):
            found.put(wanted.token_ids, to_disk=True)
        files, disk = ThrottledFiles(num_bytes / (2 * FULL_S), chunk=256), found.stack.below
        assert isinstance(disk, DiskTier)
        disk._files = files
        try:
            lookups = [await look_up(found.sharing, wanted) for wanted in (first, second)]
        finally:
            files.bytes_per_s = 1e12
        reasons = [each.plan.reason for each in lookups]
        assert reasons == [Reason.KV_LATE, Reason.DOES_NOT_PAY]
        rate = found.sharing.cost.rates.loads[DISK]
        assert FULL_S < rate.seconds(num_bytes) < 10 * FULL_S
        assert lookups[0].stage_seconds["fetch"] < 0.5 * FULL_S, "a fiftieth, and what a busy machine adds"
        assert lookups[1].stage_seconds["fetch"] == 0
