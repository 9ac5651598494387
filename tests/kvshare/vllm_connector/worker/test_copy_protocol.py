"""
Copies beside vLLM's steps, whenever they happen: the worker's real protocol, store, writing and gathering
over a small cache. The thread that copies does so only when the test says; order is all that it promises.

No block is given away while a copy from or to it is pending, no segment's bytes are overwritten before they
are read, what is written is what was saved, and everything that was begun is reported exactly once. Memory
that vLLM has taken away, as when it sleeps, is not touched.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.copying import Job
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.partial_forward import Run
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

BLOCKS, BLOCK_SIZE, HEADS, DIM, LAYERS = 24, 8, 2, 4, 3
NUM_TOKENS = 20  # of each request: three blocks, the last not full
BYTES_PER_TOKEN = HEADS * LAYERS * 2 * DIM * 4
STALE = 7777.0


class LateCopies:
    """Jobs in the order in which they came, when `run` is called, or somebody waits for one."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.failed: list[str] = []  # what raised an error in the middle, as `fail` wanted

    def submit(self, job: Job) -> Job:
        self.jobs.append(job)
        wait = job.wait

        def run_until_done(timeout_s: float | None = None) -> bool:
            while timeout_s is None and not job.is_done:
                self.run()
            return wait(0)

        job.wait = run_until_done  # type: ignore[method-assign]  # nobody else runs it
        return job

    def run(self) -> None:
        self.jobs.popleft().run()

    def fail(self) -> None:
        """The next one copies all, then raises an error."""
        job = self.jobs[0]
        act, transfer = job.act, getattr(job.act, "args", (None,))[0]

        def acting() -> dict[str, float]:
            act()
            raise RuntimeError("out of memory")

        job.act = acting
        if transfer is not None:
            self.failed.append(transfer.request.request_id)
        self.run()


class FakeForward:
    """Computes a row that says at which position it stands."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.listening = None

    def compute(self, runs: Sequence[Run], *, watching: object = None) -> None:
        import torch

        for run in runs:
            slots = self.cache.slots(run.block_ids, run.span)
            rows = torch.arange(run.span.start, run.span.end).float() + 0.5
            rows = rows[None, :, None, None].expand(LAYERS, -1, HEADS, DIM)
            self.cache.write(rows, -rows, slots)


@contextmanager
def one_rank() -> Iterator[None]:
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    with patch("kvshare.vllm_connector.worker.ranks.get_tp_group", lambda: group):
        yield


def new_worker(max_segments: int, *, num_layers: int = LAYERS, device: str = "cpu") -> ConnectorWorker:
    import torch

    from kvshare.kv.movement import STAYS
    from kvshare.vllm_connector.config import ConnectorSettings
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.segment_store import SegmentStore, arena_bytes
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

    def update(_: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat([k, v], dim=-1)

    layers = {
        str(number): SimpleNamespace(
            kv_cache=torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM, device=device),
            impl=SimpleNamespace(do_kv_cache_update=update),
        )
        for number in range(num_layers)
    }
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=NUM_TOKENS))
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    worker = ConnectorWorker(config, ConnectorSettings(), spec, list(layers))
    worker._cache = PagedCache(layers, block_size=BLOCK_SIZE)
    assert worker._cache.find_layout(0) is None
    worker._cache.kv_layout = worker._cache.kv_layout.moving([(STAYS, STAYS)] * num_layers)
    worker._forward = FakeForward(worker._cache)  # type: ignore[assignment]  # computes no model
    buffer = torch.empty(arena_bytes(max_segments * NUM_TOKENS * BYTES_PER_TOKEN), dtype=torch.uint8)
    worker._store = SegmentStore(buffer, worker._cache.kv_layout, num_heads=HEADS)
    worker._copies = LateCopies()  # type: ignore[assignment]  # has no thread
    return worker


class Protocol(RuleBasedStateMachine):
    """vLLM's scheduler is the test: it gives blocks, and takes them back when it may."""

    @initialize()
    def start(self) -> None:
        self.ranks = one_rank()
        self.ranks.__enter__()
        self.worker = new_worker(max_segments=4)
        assert isinstance(self.worker._copies, LateCopies)
        self.copies = self.worker._copies
        self.free = list(range(1, BLOCKS))
        self.numbers = iter(range(1, 10**6))
        self.blocks: dict[str, tuple[int, ...]] = {}  # of requests that hold some
        self.content: dict[str, float] = {}  # by request that has been computed: the value of its rows
        self.segments: dict[SegmentId, float] = {}  # saved and reported
        self.saving: dict[str, tuple[SegmentId, float, bool]] = {}  # and whether it has ended
        self.loading: dict[str, tuple[SegmentId, bool]] = {}  # and whether it was cancelled
        self.stale: list[torch.Tensor] = []  # caches from before a sleep
        self.step: dict[str, Any] = {
            "loads": [],
            "saves": [],
            "drops": [],
            "cancelled": [],
            "preempted": set(),
        }

    def teardown(self) -> None:
        self.copy_everything()
        assert not self.loading
        assert not self.saving
        assert sorted(self.free) == list(range(1, BLOCKS))
        self.ranks.__exit__(None, None, None)

    def copy_everything(self) -> None:
        for _ in range(2 + len(self.loading)):
            self.run_step()
            while self.copies.jobs:
                self.copies.run()
        self.run_step()

    def rows(self, block_ids: tuple[int, ...]) -> torch.Tensor:
        found = self.worker._cache.read(block_ids, Span(0, NUM_TOKENS))
        assert (found.k == -found.v).all()
        return found.k

    def give_blocks(self) -> tuple[int, ...]:
        given, self.free = self.free[:3], self.free[3:]
        return tuple(given)

    def take_blocks(self, name: str) -> None:
        """Whoever has them next writes at once."""
        import torch

        own = self.blocks.pop(name)
        for block in own:
            slots = torch.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            rubbish = torch.full((LAYERS, BLOCK_SIZE, HEADS, DIM), -9.0)
            self.worker._cache.write(rubbish, -rubbish, slots)
        self.free += own

    @precondition(lambda self: len(self.free) >= 3)
    @rule(ends=st.booleans())
    def save(self, ends: bool) -> None:
        """A request is prefilled, and saved while it runs or when it has ended."""
        import torch

        from kvshare.vllm_connector.metadata import SaveRequest

        number = next(self.numbers)
        name, value, segment_id = f"s{number}", float(number), SegmentId(number)
        self.blocks[name] = self.give_blocks()
        slots = self.worker._cache.slots(self.blocks[name], Span(0, NUM_TOKENS))
        rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), value)
        self.worker._cache.write(rows, -rows, slots)
        spans = ((segment_id, Span(0, NUM_TOKENS)),)
        self.step["saves"].append(SaveRequest(name, self.blocks[name], spans, ends))
        self.saving[name] = (segment_id, value, ends)

    @precondition(lambda self: any(not ends for _, _, ends in self.saving.values()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A running request loses its blocks with the next step, whatever is being copied from them."""
        running = [name for name, (_, _, ends) in self.saving.items() if not ends and name in self.blocks]
        pending = {request.request_id for request in self.step["saves"]}
        running = [name for name in running if name not in pending]  # in the step it runs in, it stays
        if running:
            self.step["preempted"].add(data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.segments and len(self.free) >= 3)
    @rule(data=st.data(), has_hole=st.booleans())
    def load(self, data: st.DataObject, has_hole: bool) -> None:
        self.begin_load(data.draw(st.sampled_from(sorted(self.segments))), has_hole=has_hole)

    def begin_load(self, segment_id: SegmentId, *, has_hole: bool) -> None:
        from kvshare.vllm_connector.metadata import LoadRequest

        name = f"l{next(self.numbers)}"
        self.blocks[name] = self.give_blocks()
        length = 15 if has_hole else NUM_TOKENS
        start = NUM_TOKENS - length
        copy = WireCopy(segment_id, start, length, start, start)
        tokens = tuple(range(NUM_TOKENS))
        self.step["loads"].append(LoadRequest(name, self.blocks[name], 0, NUM_TOKENS, tokens, (copy,)))
        self.loading[name] = (segment_id, False)
        self.content[name] = self.segments[segment_id]

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Loads of it may be on their way."""
        segment_id = data.draw(st.sampled_from(sorted(self.segments)))
        del self.segments[segment_id]
        self.step["drops"].append(segment_id)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Its client is gone."""
        name = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading[name] = (self.loading[name][0], True)
        self.step["cancelled"].append(name)

    @precondition(lambda self: self.copies.jobs)
    @rule(count=st.integers(1, 3))
    def copy(self, count: int) -> None:
        for _ in range(min(count, len(self.copies.jobs))):
            self.copies.run()

    @precondition(lambda self: self.copies.jobs)
    @rule()
    def fail(self) -> None:
        """A load or a save ends with an error, and has written something."""
        self.copies.fail()

    @rule(runs_step=st.booleans())
    def sleep(self, runs_step: bool) -> None:
        """
        vLLM sleeps, and has other memory when it wakes up. In a step meanwhile nothing can be done.

        vLLM is paused before it sleeps: what is to be saved has been handed over.
        """
        import torch

        self.run_step()
        self.copies.failed += self.loading
        self.worker.release_caches()
        assert not self.copies.jobs
        for layer in self.worker._cache.layers.values():
            self.stale.append(layer.kv_cache.fill_(STALE))
            layer.kv_cache = torch.full_like(layer.kv_cache, -9.0)
        if runs_step:
            if self.segments and len(self.free) >= 3:
                self.begin_load(min(self.segments), has_hole=False)
            if len(self.free) >= 3:
                self.save(ends=True)
                self.copies.failed += [request.request_id for request in self.step["saves"]]
            self.copies.failed += self.loading
            self.run_step()
        self.worker.restore_caches()

    @rule(defers=st.booleans())
    def run_step(self, defers: bool = False) -> None:
        """It `defers`: vLLM with a drafter asks what is done before it lets us save."""
        from kvshare.vllm_connector.metadata import StepMetadata

        made, self.step = self.step, {key: type(value)() for key, value in self.step.items()}
        preempted = frozenset(made.pop("preempted"))
        own: dict[str, Any] = {key: tuple(value) for key, value in made.items()}
        step = StepMetadata(**own, preempted=preempted)
        self.worker.begin(step)
        for name in preempted:
            if name in self.blocks:
                self.take_blocks(name)
        self.worker.advance(step)
        if not defers:
            self.worker.save(step)
        transfers, report = self.worker.take_transfers(), self.worker.build_connector_worker_meta()
        if defers:
            self.worker.save(step)
        failed = set() if report is None else report.failed_saves
        for name in transfers.finished_sending | (set() if report is None else report.saved_prompts):
            segment_id, value, ends = self.saving.pop(name)
            assert ends == (name in transfers.finished_sending)
            assert name in failed or name not in self.copies.failed  # without room, too, it failed
            if name not in failed:
                self.segments[segment_id] = value
            else:
                assert self.worker._store is not None
                assert segment_id not in self.worker._store
            if name in self.blocks:
                self.take_blocks(name)
        for name in transfers.finished_recving:
            self.check_loaded(name, failed=name in transfers.failed_recving)

    def check_loaded(self, name: str, *, failed: bool) -> None:
        _, is_cancelled = self.loading.pop(name)
        assert failed == (name in self.copies.failed)
        if not failed and not is_cancelled:
            rows = self.rows(self.blocks[name])
            positions = [float(p) + 0.5 for p in range(NUM_TOKENS)]
            for position, own in enumerate(rows.transpose(0, 1)):
                written, computed = self.content[name], positions[position]
                assert (own == written).all() or (position < 5 and (own == computed).all())
        self.take_blocks(name)

    @invariant()
    def memory_from_before_a_sleep_is_not_touched(self) -> None:
        assert all((cache == STALE).all() for cache in self.stale)

    @invariant()
    def every_segment_is_what_was_saved(self) -> None:
        assert self.worker._store is not None
        for segment_id, stored in self.worker._store.find(self.segments).items():
            assert stored.is_whole
            assert (stored.rows[:, :, 0] == self.segments[segment_id]).all()


@pytest.mark.filterwarnings("ignore")
def test_whatever_comes_whenever_it_is_copied() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Protocol,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_what_is_preempted_was_copied_before_its_blocks_are_given_away() -> None:
    machine = Protocol()
    machine.start()
    machine.save(ends=False)
    machine.run_step()
    machine.step["preempted"].add("s1")
    machine.run_step()
    assert not machine.copies.jobs
    machine.run_step()
    assert machine.segments == {SegmentId(1): 1.0}
    machine.every_segment_is_what_was_saved()
    machine.teardown()


def test_fifty_planned_arrivals_are_computed_over_steps_in_their_order() -> None:
    """
    Whatever is copied by when, no step computes more than two loads' 10 tokens, and nobody starves.

    Blocks are shared: each load computes the same rows in them.
    """
    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata

    with one_rank():
        worker, computed = new_worker(1), list[int]()
        worker._step_tokens = 10
        compute = worker._forward.compute

        def counted(runs: Sequence[Run], **options: Any) -> None:
            computed.append(sum(len(run.span) for run in runs))
            compute(runs, **options)

        worker._forward.compute = counted  # type: ignore[method-assign]
        copies: Any = worker._copies
        spans = ((SegmentId(1), Span(0, NUM_TOKENS)),)
        worker.save(StepMetadata(saves=(SaveRequest("s", (1, 2, 3), spans),)))
        copies.run()
        piece = (WireCopy(SegmentId(1), 5, NUM_TOKENS - 5, 5, 5),)
        names = [f"l{number}" for number in range(50)]
        tokens = tuple(range(NUM_TOKENS))
        step = StepMetadata(
            loads=tuple(LoadRequest(name, (4, 5, 6), 0, NUM_TOKENS, tokens, piece) for name in names)
        )
        reported = list[list[str]]()
        worker.begin(step)
        while sum(map(len, reported)) < 50:
            for _ in range(min(3, len(copies.jobs))):  # more arrive than a step computes
                copies.run()
            worker.advance(StepMetadata())
            transfers = worker.take_transfers()
            assert not transfers.failed_recving
            reported.append(sorted(transfers.finished_recving, key=names.index))
            assert reported[-1], "each step computes something"
    assert [name for each in reported for name in each] == names
    assert computed == [10] * 25


def test_a_segment_that_leaves_is_read_before_its_bytes_are_taken() -> None:
    """The next prompt takes its place in the arena while a load of it waits to be copied."""
    machine = Protocol()
    machine.start()
    for _ in range(4):
        machine.save(ends=True)
    machine.copy_everything()
    segment_id = min(machine.segments)
    machine.begin_load(segment_id, has_hole=False)
    machine.step["drops"].append(segment_id)
    del machine.segments[segment_id]
    machine.save(ends=True)
    machine.teardown()


def test_memory_that_ranks_share_is_free_when_both_have_copied() -> None:
    """
    A segment is dropped while a load of it waits on both ranks. One rank copies ahead: it must not save the
    next prompt where the other rank has yet to read.
    """
    import torch

    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata
    from kvshare.vllm_connector.worker.segment_store import SegmentStore, arena_bytes

    buffer = torch.empty(arena_bytes(2 * 2 * NUM_TOKENS * BYTES_PER_TOKEN), dtype=torch.uint8)
    workers = [new_worker(1), new_worker(1)]
    for number, worker in enumerate(workers):
        layout = worker._cache.kv_layout
        worker._store = SegmentStore(buffer, layout, num_heads=2 * HEADS, first_head=number * HEADS)
        worker._shares_memory = True
        for blocks, value in (((1, 2, 3), 1.0), ((7, 8, 9), 2.0)):
            rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), value + 0.1 * number)
            worker._cache.write(rows, -rows, worker._cache.slots(blocks, Span(0, NUM_TOKENS)))
    barrier, given = threading.Barrier(2, timeout=10), dict[int, list[bool]]()

    def agreed(mine: Sequence[bool]) -> list[bool]:
        given[threading.get_ident()] = list(mine)
        barrier.wait()
        both = [all(each) for each in zip(*given.values(), strict=True)]
        barrier.wait()
        return both

    def step(**own: Any) -> None:
        given.clear()
        made = StepMetadata(**{"loads": (), "saves": (), "drops": (), "cancelled": ()} | own)

        def run(worker: ConnectorWorker) -> None:
            worker.begin(made)
            worker.advance(made)
            worker.save(made)

        with patch("kvshare.vllm_connector.worker.worker.agreed", agreed), ThreadPoolExecutor(2) as threads:
            list(threads.map(run, workers))

    def copy(worker: ConnectorWorker) -> None:
        assert isinstance(worker._copies, LateCopies)
        while worker._copies.jobs:
            worker._copies.run()

    first, second = SegmentId(1), SegmentId(2)
    with one_rank():
        step(saves=(SaveRequest("s", (1, 2, 3), ((first, Span(0, NUM_TOKENS)),), True),))
        for worker in workers:
            copy(worker)
        step()
        tokens, copies = tuple(range(NUM_TOKENS)), (WireCopy(first, 0, NUM_TOKENS, 0, 0),)
        step(loads=(LoadRequest("l", (4, 5, 6), 0, NUM_TOKENS, tokens, copies),))
        step(drops=(first,), saves=(SaveRequest("t", (7, 8, 9), ((second, Span(0, 12)),), True),))
        for worker in reversed(workers):
            copy(worker)
        step()
    for number, worker in enumerate(workers):
        report, transfers = worker.build_connector_worker_meta(), worker.take_transfers()
        assert report is not None
        assert transfers.finished_sending == {"s", "t"}
        assert not report.failed_saves
        assert not report.loads["l"].failed
        assert not report.unreadable
        loaded = worker._cache.read((4, 5, 6), Span(0, NUM_TOKENS))
        assert (loaded.k == torch.tensor(1 + 0.1 * number)).all()
        assert worker._store is not None
        assert worker._store.find([second])[second].is_whole
    arenas = [worker._store.arena for worker in workers if worker._store is not None]
    assert arenas[0]._by_start == arenas[1]._by_start
    assert sum(end - start for start, end in arenas[0]._by_start.items()) > arena_bytes(
        2 * NUM_TOKENS * BYTES_PER_TOKEN
    ), "the dropped segment's memory is free again"
