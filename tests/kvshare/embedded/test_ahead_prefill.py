"""The beginning of a prompt is computed while the rest is read: the answers, and what is read too late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from delta_tree import TokenIds, token_ids
from kvshare.embedded.ahead_prefill import AheadPrefill
from kvshare.embedded.decoder import RunningPrefill
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.engine import Started
from kvshare.kv.tier import Fetched
from kvshare.reasons import Reason
from kvshare.requests import Decision, SharingMode
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import DISK, MEMORY, Estimate, LoadRate, Queue, Rates
from kvshare.sharing.splitting import split_reads
from kvshare.tiers.readers import StackReads
from kvshare_lab.bench.harness import Answer, ask
from kvshare_lab.bench.throttled import disk_of
from lab.tests.fidelity.scenes import CLOSE, SCENES, trial
from tests.kvshare.embedded.test_prefill import computed, plan_of
from tests.kvshare.embedded.tiny_engine import engine_at, prompt, request, stored, stream
from tests.kvshare.tiers.faulty_files import WaitingFiles

DONOR = prompt(900)
SETTINGS: dict[str, Any] = {"store.kv_bytes": 2**24}  # segments are short
LONG_S, SHORT_S = 600.0, 3.0  # of a full prefill, by the rates: what is read is in time, or is soon late


class HeldFiles(WaitingFiles):
    """Reads of chosen files wait, too."""

    def __init__(self) -> None:
        super().__init__()
        self.held: frozenset[Path] = frozenset()
        self._paths: dict[int, Path] = {}

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        self._paths[descriptor] = path
        return descriptor

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        if self._paths[descriptor] in self.held:
            self.may_read.wait(120)
        return super(WaitingFiles, self).read(descriptor, into, offset)


@asynccontextmanager
async def on_disk(path: Path, *, full_s: float) -> AsyncIterator[tuple[EmbeddedEngine, HeldFiles]]:
    """An engine whose prompt is on disk only. By its rates reads takes as long as computing."""
    engine = engine_at(path, **SETTINGS)
    await engine.start()
    await stored(engine, DONOR)
    await engine.stop()
    engine, files = engine_at(path, **{**SETTINGS, "cost.min_saved_s": 0.0}), HeldFiles()
    await engine.start()
    await engine.settle()
    try:
        cost = engine.sharing.cost
        num_bytes = len(DONOR) * cost.rates.bytes_per_token
        loads = {MEMORY: LoadRate(0.0, 1e-12), DISK: LoadRate(0.0, full_s / num_bytes)}
        linear = Rates.linear(len(DONOR) / full_s, 1e12, bytes_per_token=cost.rates.bytes_per_token)
        cost.rates = replace(linear, loads=MappingProxyType(loads), computes_ahead=cost.rates.computes_ahead)
        disk_of(engine)[1]._files = files
        yield engine, files
    finally:
        files.may_read.set()
        await engine.stop()


async def asked(
    engine: EmbeddedEngine,
    tokens: TokenIds = DONOR,
    mode: SharingMode = SharingMode.APPROX,
    *,
    store: bool = False,
) -> Answer:
    return await ask(engine, tokens, mode=mode, tenant="t", max_tokens=8, store=store)


async def test_a_part_is_read_and_the_answer_is_that_of_a_full_prefill(tmp_path: Path) -> None:
    """Some segments come from disk, the others are computed; afterwards all that was read is in memory."""
    async with on_disk(tmp_path, full_s=LONG_S) as (engine, _):
        full = await asked(engine, mode=SharingMode.OFF)
        answer = await asked(engine)
        assert answer.text == full.text
        assert answer.report.decision is Decision.EXACT
        assert 200 < answer.report.num_exact < 700
        assert answer.report.num_prompt_tokens == len(DONOR)
        memory, disk = engine.status().tiers
        assert 0 < memory.num_segments == disk.num_hits < disk.num_segments


@pytest.mark.parametrize("num_held", [1, 99], ids=["one file", "all files"])
async def test_what_is_read_too_late_is_computed(tmp_path: Path, num_held: int) -> None:
    """The report says so, nothing is wrong, and nothing was waited for longer than that costs."""
    async with on_disk(tmp_path, full_s=SHORT_S) as (engine, files):
        full = await asked(engine, mode=SharingMode.OFF)
        _, disk = disk_of(engine)
        segments = sorted(filter(None, map(disk.segment, disk.ids())), key=lambda each: each.first_position)
        assert len(segments) > 6
        files.may_read.clear()
        files.held = frozenset(disk._path(each.segment_id) for each in segments[-num_held:])
        answer = await asked(engine, store=True)
        assert answer.text == full.text
        assert answer.report.reason is Reason.KV_LATE
        assert answer.report.decision is (Decision.EXACT if num_held == 1 else Decision.FULL)
        assert answer.report.num_prompt_tokens == len(DONOR)
        assert answer.finished.stage_seconds["fetch"] < 0.6 * SHORT_S, "besides what is computed meanwhile"
        files.may_read.set()
        files.held = frozenset()
        longer = token_ids(np.concatenate([DONOR, prompt(60, seed=1)]))
        again, plain = [await asked(engine, longer, mode) for mode in (SharingMode.EXACT, SharingMode.OFF)]
        assert again.text == plain.text, "what was stored then is right"


class LateReads:
    """Is over at the third look."""

    def __init__(self, fetched: Fetched) -> None:
        self._fetched, self._num_left = fetched, 2

    def wait(self, at_most_s: float) -> bool:
        self._num_left -= 1
        return self._num_left < 0

    def end(self) -> Fetched:
        return self._fetched

    def cancel(self) -> None:
        raise AssertionError("it was over")


def split(plan: Plan) -> Plan:
    """The plan on a disk that is as fast as computing."""
    rates = Rates.linear(100.0, 1e12, bytes_per_token=1)
    loads = {MEMORY: LoadRate(0.0, 0.0), DISK: LoadRate(0.0, 0.01)}
    on_disk = frozenset(copy.segment_id for copy in plan.copies)
    return split_reads(
        replace(plan, estimate=Estimate(9.0, 9.0)),
        replace(rates, loads=MappingProxyType(loads), computes_ahead=True, queue=Queue(on_disk=on_disk)),
    )


@pytest.mark.parametrize("scene", sorted(SCENES))
@pytest.mark.parametrize("max_queries", [512, 7])
def test_the_rest_is_computed_as_if_all_had_been_there(scene: str, max_queries: int) -> None:
    """The same KV and logits as with all copies in memory from the start; while it waits, nothing."""
    made = trial(scene)
    plan = split(plan_of(made))
    assert plan.num_ahead
    expected_plan, expected, expected_logits = computed(made, plan)
    model, tokens = made.model.model, made.scenario.prompt.token_ids
    kv = model.new_sequence(made.num_tokens)

    running: list[RunningPrefill] = []

    def go_on(fetched: Fetched, waited_s: float) -> None:
        kv.write_copies(plan.copies, fetched.segments)
        running.append(model.prefill(tokens, plan, kv, num_computed=plan.num_ahead))

    beginning = model.prefill(tokens[: plan.num_ahead], NoPlan(), kv)
    reads = LateReads(Fetched(made.stored.kv, frozenset()))
    running.append(AheadPrefill(beginning, plan, reads, go_on))
    logits, num_computed = None, []
    while logits is None:
        number, logits = running[-1].advance(max_queries=max_queries)
        num_computed.append(number)
    assert num_computed.count(0) == 3
    assert running[-1].plan == expected_plan.plan
    for one, other in ((kv.k, expected.k), (kv.v, expected.v)):
        assert torch.allclose(one, other, atol=CLOSE)
    assert torch.allclose(torch.log_softmax(logits, dim=-1), expected_logits, atol=CLOSE)


async def test_a_request_that_ends_early_reads_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still read for it is given up, and teaches nothing about the disk."""
    cancelled = asyncio.Event()
    monkeypatch.setattr(StackReads, "cancel", lambda self: cancelled.set())
    async with on_disk(tmp_path, full_s=LONG_S) as (engine, files):
        stack, disk = disk_of(engine)
        files.may_read.clear()
        files.held = frozenset(map(disk._path, disk.ids()))
        with patch.object(engine.sharing.cost, "observe_load") as observed:
            events = stream(engine, await request(engine, DONOR))
            assert isinstance(await anext(events), Started)
            await events.aclose()
            async with asyncio.timeout(60):
                await cancelled.wait()
        assert not observed.called
        assert not stack._slow.is_recent
