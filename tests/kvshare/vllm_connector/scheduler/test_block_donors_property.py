"""
Copies from vLLM's own blocks, with its real scheduler and pool, whatever comes in which order: next to a
second one whose copies all come from host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvshare.vllm_protocol.messages import FinishedReport, Prefilled, WireCopy
from tests.kvshare.vllm_connector.scheduler.scheduled_memory import LONGEST, ScheduledMemory

if TYPE_CHECKING:
    from delta_tree import SegmentId

_MAX_STEPS = 400
_RECENT = 5  # segments, of which others are copied: their blocks are given away last
_PART = st.tuples(st.integers(0, _RECENT - 1), st.integers(0, 3))  # of a segment: which, and from where on


class Donors(RuleBasedStateMachine):
    """
    No request is preempted, and no reset of the prefix cache fails, because of our references only.

    What is read from blocks is what was saved, until the end of the copies. Then nothing is held any more.
    """

    num_drafts = 0  # for each step

    @initialize()
    def start(self) -> None:
        self.tested = ScheduledMemory(copies_blocks=True, num_drafts=self.num_drafts)
        self.stock = ScheduledMemory(copies_blocks=False, num_drafts=self.num_drafts)
        self.both = (self.tested, self.stock)
        self.num_sent = 0
        for length in (22, 37):
            self.send(length, max_tokens=3, is_new=True)
            self.run_steps(6)
        assert len(self.known()) > 1

    def teardown(self) -> None:
        if not hasattr(self, "both"):
            return
        for each in self.both:
            self.finish(each)
            each.vllm.shutdown()

    def finish(self, each: ScheduledMemory) -> None:
        for _ in range(_MAX_STEPS):
            if not each.vllm.has_requests():
                break
            for name in list(each.loading):
                each.end_load(name, fails=False)
            each.step()
        assert not each.vllm.has_requests(), "a request waits for ever"
        assert all(request.is_finished() for request in each.sent)
        assert not each.held_for_copies()
        assert not each.ours.donors.has_pinned
        assert each.vllm.reset_prefix_cache()

    @rule(length=st.integers(10, LONGEST), max_tokens=st.integers(1, 12), is_new=st.booleans())
    def send(self, length: int, max_tokens: int, is_new: bool) -> None:
        """A prompt that becomes a donor; vLLM's prefix cache may have a part of it."""
        tokens = [self.num_sent + 1 if is_new else 1, *range(1, length)]
        for each in self.both:
            each.send(f"r{self.num_sent}", tokens, (), max_tokens=max_tokens)
        self.num_sent += 1

    @precondition(lambda self: self.known())
    @rule(
        data=st.data(),
        before=st.integers(0, 9),
        moves=st.booleans(),
        max_tokens=st.integers(1, 12),
        runs=st.integers(0, 2),
    )
    def send_near_ones(
        self, data: st.DataObject, before: int, moves: bool, max_tokens: int, runs: int
    ) -> None:
        """Two prompts with parts of what is stored, at other positions or at the same ones where they can."""
        for _ in range(2):
            self.send_near(data, before, max_tokens, moves=moves)
        self.run_steps(runs)

    def send_near(self, data: st.DataObject, before: int, max_tokens: int, *, moves: bool) -> None:
        segments = self.known()[-_RECENT:]
        position, picked = before, []
        # Draws do not depend on what is stored: ids of segments are random, and so may be their order.
        for drawn, most in data.draw(st.lists(_PART, min_size=1, max_size=3)):
            index = drawn % len(segments)
            start, length = segments[index][1:]
            offset = min(most, length - 1)
            position = position if moves else max(position, start + offset)
            length = min(length - offset, LONGEST - position - 1)
            if length > 0:
                picked.append((index, offset, length, position, start + offset))
                position += length + 1
        for each in self.both:
            own = self.known(each)[-_RECENT:]
            copies = tuple(WireCopy(own[index][0], *rest) for index, *rest in picked if index < len(own))
            tokens = [50 + self.num_sent % 40] * (position + 2)
            each.send(f"r{self.num_sent}", tokens, copies, max_tokens=max_tokens)
        self.num_sent += 1

    def known(self, each: ScheduledMemory | None = None) -> list[tuple[SegmentId, int, int]]:
        """Segments that are stored, in the order in which they were: their ids, begins and lengths."""
        each = each or self.tested
        events = each.ours.events.read(0).events
        found = dict.fromkeys(
            s for e in events if isinstance(e, Prefilled | FinishedReport) for s in e.stored
        )
        held = [s for s in found if s.segment_id in each.ours.segments]
        return [(s.segment_id, s.start, s.length) for s in held]

    @rule(count=st.integers(1, 5))
    def run_steps(self, count: int) -> None:
        for each in self.both:
            for _ in range(count):
                if each.vllm.has_requests():
                    each.step()

    @precondition(lambda self: self.tested.reading)
    @rule()
    def end_copies(self) -> None:
        """What no block covers is still being computed."""
        for name in list(self.tested.reading):
            self.tested.end_copies(name)

    @rule(fails=st.booleans())
    def end_loads(self, fails: bool) -> None:
        for each in self.both:
            for name in list(each.loading):
                each.end_load(name, fails=fails)

    @rule(data=st.data(), what=st.sampled_from(["abort", "abort", "drop", "reset", "reset running ones"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        """A request is aborted, a segment dropped by the proxy, vLLM's prefix cache reset."""
        number = data.draw(st.integers(0, self.num_sent - 1))
        for each in self.both:
            if what == "abort":
                self.abort(each, f"r{number}")
            elif what == "drop":
                own = self.known(each)
                each.ours.drop([segment_id for segment_id, *_ in own[number : number + 1]])
            else:
                self.reset(each, running=what == "reset running ones")

    def abort(self, each: ScheduledMemory, name: str) -> None:
        """Its load may be under way."""
        from vllm.v1.request import RequestStatus

        if name in each.vllm.requests and not each.vllm.requests[name].is_finished():
            each.vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, each: ScheduledMemory, *, running: bool) -> None:
        """It fails where a request holds blocks, and only there."""
        others = each.holders().keys() - {request.request_id for request in each.vllm.running}
        if running and not others:  # vLLM raises an error if others hold blocks
            assert each.vllm.reset_prefix_cache(reset_running_requests=True)
        else:
            assert each.vllm.reset_prefix_cache() == (not each.holders())

    @invariant()
    def nothing_is_held_without_a_load(self) -> None:
        if not hasattr(self, "both"):
            return
        for each in self.both:
            each.check_sources()
        if not self.tested.loading and not self.tested.report.loads and not self.tested.ours._loads:
            assert not self.tested.held_for_copies()
        assert not self.stock.held_for_copies()


class DonorsWithDrafts(Donors):
    """The same with speculative decoding: what was rejected is never saved, nor copied from a block."""

    num_drafts = 3


class ManyDonors(Donors):
    """More of the same."""


class ManyDonorsWithDrafts(DonorsWithDrafts):
    """More of the same."""


TestDonors = Donors.TestCase
TestDonors.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
TestDonorsWithDrafts = DonorsWithDrafts.TestCase
TestDonorsWithDrafts.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)
TestManyDonors = pytest.mark.long(ManyDonors.TestCase)
TestManyDonors.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestManyDonorsWithDrafts = pytest.mark.long(ManyDonorsWithDrafts.TestCase)
TestManyDonorsWithDrafts.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
