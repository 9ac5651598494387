"""
Copies next to vLLM's steps, whenever they happen: the real worker over a small cache.

No block is given away while a copy from or to it is pending, no segment's bytes are overwritten before they
are read, what is written is what was saved, and everything that was begun is reported exactly once. Memory
that vLLM has taken away, as when it sleeps, is not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delta_tree import SegmentId, Span
from kvshare.sharing.plan import RepairOrder
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import (
    BLOCK_SIZE,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    NUM_TOKENS,
    is_whole,
    late_copies,
    late_device,
    new_worker,
    one_rank,
    use,
)

if TYPE_CHECKING:
    import torch

STALE = 7777.0


class Protocol(RuleBasedStateMachine):
    """vLLM's scheduler is the test: it gives blocks, and takes them back when it may."""

    @initialize()
    def start(self) -> None:
        self.ranks = one_rank()
        self.ranks.__enter__()
        self.worker = new_worker(max_segments=4)
        use(self.worker, self.worker.attached, can_listen=True)
        self.device = self.worker.parts.placeholders._device = late_device()
        self.copies, self.cache = late_copies(self.worker), self.worker.attached.cache
        self.free = list(range(1, BLOCKS))
        self.numbers = iter(range(1, 10**6))
        self.blocks: dict[str, tuple[int, ...]] = {}  # of requests that hold some
        self.num_computed: dict[str, int] = {}  # of each load's rows
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
        found = self.cache.read(block_ids, Span(0, NUM_TOKENS))
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
            self.cache.write(rubbish, -rubbish, slots)
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
        slots = self.cache.slots(self.blocks[name], Span(0, NUM_TOKENS))
        rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), value)
        self.cache.write(rows, -rows, slots)
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
    @rule(data=st.data(), has_hole=st.booleans(), chooses=st.booleans())
    def load(self, data: st.DataObject, has_hole: bool, chooses: bool) -> None:
        segment_id = data.draw(st.sampled_from(sorted(self.segments)))
        self.begin_load(segment_id, has_hole=has_hole, chooses=chooses)

    def begin_load(self, segment_id: SegmentId, *, has_hole: bool, chooses: bool = False) -> None:
        from kvshare.vllm_connector.metadata import LoadRequest

        name = f"l{next(self.numbers)}"
        self.blocks[name] = self.give_blocks()
        length = 15 if has_hole else NUM_TOKENS
        start = NUM_TOKENS - length
        copy = WireCopy(segment_id, start, length, start, start)
        tokens = tuple(range(NUM_TOKENS))
        order = RepairOrder((Span(start, NUM_TOKENS),), (start + 1, start + 7), 4) if chooses else None
        self.step["loads"].append(LoadRequest(name, self.blocks[name], 0, NUM_TOKENS, tokens, (copy,), order))
        self.num_computed[name] = start + 4 * chooses
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
    @rule(count=st.integers(1, 3), data=st.data())
    def copy(self, count: int, data: st.DataObject) -> None:
        """In any order: saves may overtake loads, too."""
        for _ in range(min(count, len(self.copies.jobs))):
            self.copies.hurry(data.draw(st.sampled_from(self.copies.jobs)))
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
        for layer in self.cache.layers.values():
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

    @rule(defers=st.booleans(), has_arrived=st.booleans())
    def run_step(self, defers: bool = False, has_arrived: bool = True) -> None:
        """It `defers`: vLLM with a drafter asks what is done before it lets us save. Results have arrived."""
        from kvshare.vllm_connector.metadata import StepMetadata

        self.device.has_arrived = has_arrived
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
                assert segment_id not in self.worker.attached.store
            if name in self.blocks:
                self.take_blocks(name)
        for name in transfers.finished_recving:
            self.check_loaded(name, failed=name in transfers.failed_recving)

    def check_loaded(self, name: str, *, failed: bool) -> None:
        _, is_cancelled = self.loading.pop(name)
        assert failed == (name in self.copies.failed)
        if not failed and not is_cancelled:
            rows = self.rows(self.blocks[name])
            own = list(enumerate(rows.transpose(0, 1)))
            num_computed = sum(bool((row == position + 0.5).all()) for position, row in own)
            num_written = sum(bool((row == self.content[name]).all()) for _, row in own)
            assert num_computed == self.num_computed[name] == NUM_TOKENS - num_written
        self.take_blocks(name)

    @invariant()
    def memory_from_before_a_sleep_is_not_touched(self) -> None:
        assert all((cache == STALE).all() for cache in self.stale)

    @invariant()
    def every_segment_is_what_was_saved(self) -> None:
        for segment_id, stored in self.worker.attached.store.find(self.segments).items():
            assert is_whole(stored)
            assert (stored.rows[:, :, 0] == self.segments[segment_id]).all()
