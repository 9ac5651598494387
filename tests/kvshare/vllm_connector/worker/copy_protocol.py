"""
Copies next to vLLM's steps, whenever they happen: the real worker over a small cache.

No block is given away while a copy from or to it is pending, no segment's bytes are overwritten before they
are read, what is written is what was saved, and everything that was begun is reported exactly once. Memory
that vLLM has taken away, as when it sleeps, is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from delta_tree import SegmentId, Span
from kvshare.sharing.plan import RepairOrder
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.blocks_of_requests import BlocksOfRequests
from tests.kvshare.vllm_connector.worker.small_worker import (
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
    write_rows,
)

if TYPE_CHECKING:
    import torch

STALE = 7777.0


class Protocol(BlocksOfRequests):
    """vLLM's scheduler is the test: it gives blocks, and takes them back when it may."""

    shapes: Sequence[tuple[int, int]] = ((HEADS, DIM),) * LAYERS

    @initialize()
    def start(self) -> None:
        self.ranks = ExitStack()
        self.ranks.enter_context(one_rank())
        self.worker = new_worker(max_segments=4, shapes=self.shapes)
        use(self.worker, self.worker.attached, can_listen=True)
        self.device = self.worker.parts.placeholders._device = late_device()
        self.copies, self.cache = late_copies(self.worker), self.worker.attached.cache
        self.free, self.numbers = list(range(1, BLOCKS)), iter(range(1, 10**6))
        self.blocks: dict[str, tuple[int, ...]] = {}  # of requests that hold some
        self.num_computed: dict[str, int] = {}  # of each load's rows
        self.content: dict[str, float] = {}  # by request that has been computed: the value of its rows
        self.segments: dict[SegmentId, float] = {}  # saved and reported
        self.saving: dict[str, tuple[SegmentId, float, bool]] = {}  # and whether it has ended
        self.loading: dict[str, tuple[SegmentId, bool]] = {}  # and whether it was cancelled
        self.announced: set[str] = set()  # loads that vLLM counts as arrived: they join a step
        self.donors: dict[str, str] = {}  # requests whose blocks are read, by the load that does
        self.choosing: set[str] = set()  # loads that join none
        self.stale: list[torch.Tensor] = []  # caches from before a sleep
        lists = ("loads", "saves", "drops", "cancelled", "joining", "arriving")
        self.step: dict[str, Any] = {**{name: [] for name in lists}, "preempted": set()}

    def teardown(self) -> None:
        with self.ranks:
            self.copy_everything()
        assert not self.loading
        assert not self.saving
        assert sorted(self.free) == list(range(1, BLOCKS))

    def copy_everything(self) -> None:
        for _ in range(2 + len(self.loading)):
            self.step["joining"] = sorted(self.announced)
            self.run_step()
            while self.copies.jobs:
                self.copies.run()
        self.run_step()

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
        write_rows(self.cache, torch.full((NUM_TOKENS,), value), slots)
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
    @rule(data=st.data(), has_hole=st.booleans(), how=st.sampled_from(["chooses", "joins", "waits"]))
    def load(self, data: st.DataObject, has_hole: bool, how: str) -> None:
        segment_id = data.draw(st.sampled_from(sorted(self.segments)))
        name = self.begin_load(segment_id, has_hole=has_hole, chooses=how == "chooses")
        if how == "joins":
            self.step["joining"].append(name)

    @precondition(lambda self: len(self.free) >= 3)
    @rule(has_medium=st.booleans())
    def load_what_is_lost(self, has_medium: bool) -> None:
        """Its tokens are computed instead, but a medium cannot be: then the load fails."""
        from kvshare.vllm_connector.metadata import LoadRequest

        number = next(self.numbers)
        name, copy = f"l{number}", WireCopy(SegmentId(number), 0, NUM_TOKENS, 0, 0)
        self.blocks[name], media = self.give_blocks(), (Span(8, 12),) if has_medium else ()
        place = (self.blocks[name], 0, NUM_TOKENS, tuple(range(NUM_TOKENS)))
        self.step["loads"].append(LoadRequest(name, *place, (copy,), media=media))
        self.num_computed[name], self.content[name] = NUM_TOKENS, float(number)
        self.loading[name] = (copy.segment_id, False)
        self.choosing.add(name)  # it joins no step
        self.copies.failed += [name] * has_medium

    @precondition(lambda self: self.loading.keys() - self.announced - self.choosing)
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        """A load may be announced as arrived, whether it is on its way, cancelled or complete."""
        candidates = sorted(self.loading.keys() - self.announced - self.choosing)
        self.step["arriving"].append(data.draw(st.sampled_from(candidates)))

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        """vLLM plans the next step of a request that it counts as loaded."""
        name = data.draw(st.sampled_from(sorted(self.announced)))
        self.step["joining"] = sorted({*self.step["joining"], name})

    def begin_load(self, segment_id: SegmentId, *, has_hole: bool, chooses: bool = False) -> str:
        from kvshare.vllm_connector.metadata import LoadRequest

        name = f"l{next(self.numbers)}"
        self.blocks[name] = self.give_blocks()
        start = 5 if has_hole else 0
        copy = WireCopy(segment_id, start, NUM_TOKENS - start, start, start)
        order = RepairOrder((Span(start, NUM_TOKENS),), (start + 1, start + 7), 4) if chooses else None
        own = (self.blocks[name], 0, NUM_TOKENS, tuple(range(NUM_TOKENS)), (copy,))
        self.step["loads"].append(LoadRequest(name, *own, order))
        self.num_computed[name] = start + 4 * chooses
        self.choosing |= {name} if chooses else set()
        self.loading[name] = (segment_id, False)
        self.content[name] = self.segments[segment_id]
        return name

    @precondition(lambda self: len(self.free) >= 6)
    @rule(has_hole=st.booleans())
    def load_from_blocks(self, has_hole: bool) -> None:
        """Host memory never had this segment. vLLM takes the donor's blocks when nobody reads them."""
        import torch

        from kvshare.vllm_connector.metadata import BlockSource, LoadRequest

        number = next(self.numbers)
        donor, name, value = f"d{number}", f"l{number}", float(number)
        self.blocks[donor], self.blocks[name] = self.give_blocks(), self.give_blocks()
        slots = self.cache.slots(self.blocks[donor], Span(0, NUM_TOKENS))
        write_rows(self.cache, torch.full((NUM_TOKENS,), value), slots)
        start = 5 if has_hole else 0
        copy = WireCopy(SegmentId(number), 0, NUM_TOKENS - start, start, 0)
        source = {copy: BlockSource(self.blocks[donor], 0)}
        tokens = tuple(range(NUM_TOKENS))
        load = LoadRequest(name, self.blocks[name], 0, NUM_TOKENS, tokens, (copy,), sources=source)
        self.step["loads"].append(load)
        self.num_computed[name], self.content[name] = start, value
        self.loading[name], self.donors[name] = (SegmentId(number), False), donor

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
        if name in self.step["joining"] and name not in self.announced:
            return  # vLLM runs it with its load
        self.loading[name] = (self.loading[name][0], True)
        self.step["cancelled"].append(name)
        self.announced.discard(name)
        self.step["joining"] = [each for each in self.step["joining"] if each != name]

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
        joined = {name: self.rows(self.blocks[name]).clone() for name in step.joining}  # for the forward pass
        self.worker.advance(step)
        if not defers:
            self.worker.save(step)
        transfers, report = self.worker.take_transfers(), self.worker.build_connector_worker_meta()
        if defers:
            self.worker.save(step)
        assert report is not None  # each step has a forward pass
        for name in report.copied | report.loads.keys():
            if name in self.donors:
                self.take_blocks(self.donors.pop(name))
        for name in transfers.finished_sending | report.saved_prompts:
            segment_id, value, ends = self.saving.pop(name)
            assert ends == (name in transfers.finished_sending)
            has_failed = name in report.failed_saves  # without room, too
            assert has_failed or name not in self.copies.failed
            assert not (has_failed and segment_id in self.worker.attached.store)
            if not has_failed:
                self.segments[segment_id] = value
            if name in self.blocks:
                self.take_blocks(name)
        arriving = report.arriving
        assert arriving <= set(step.arriving) & transfers.finished_recving
        self.announced |= arriving
        for name, rows in joined.items():
            self.check_joined(name, rows, failed=report.loads.pop(name).failed)
        for name in transfers.finished_recving - arriving:
            self.check_loaded(name, failed=name in transfers.failed_recving)
        assert report.loads.keys() == transfers.finished_recving - arriving

    @invariant()
    def memory_from_before_a_sleep_is_not_touched(self) -> None:
        assert all((cache == STALE).all() for cache in self.stale)

    @invariant()
    def every_segment_is_what_was_saved(self) -> None:
        for segment_id, stored in self.worker.attached.store.find(self.segments).items():
            assert is_whole(stored)
            assert all((part.rows[:, :, 0] == self.segments[segment_id]).all() for part in stored.parts)
