"""
Which loads join a step: vLLM may compute the request's tail in a step that begins before its copies have
arrived, because the GPU still computes earlier ones. The worker waits for the copies and computes the
placeholders before that step's forward pass.

    the GPU    [ step 7 ..... ][ step 8, 8,192 tokens ........ ][ pass, step 9 ][ pass, step 10 ]
    the host    plans 8         plans 9: copies [=====] of load A                plans 10: B's tail
                                plans 9: copies of load B [============]
                A joins at once, as its copies fit into what step 8 still takes
                B does not, but they fit into steps 8 and 9: it is announced to vLLM with step 9

While the copies of a load that joins are on their way vLLM's thread waits, and the GPU too if they come late.
So the time that is left is taken from the shortest of like steps, and that of the copies from the slowest of
like loads, with a margin. What the GPU waits all the same is measured, and added to the margin.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvshare.vllm_connector.metadata import LoadResult
from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest

_SEEN = 8  # of like steps, and of loads
_MARGIN = 1.25
_MARGIN_S = 0.002  # the host's part: to plan a step and to launch it


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    number: int
    num_tokens: int
    planned_at: float


@dataclass(slots=True)
class _LoadUnderWay:
    """`is_announced`: it is announced to vLLM as arrived, or was. `may_join`: if that is allowed at all."""

    num_bytes: int
    num_placeholders: int
    arrives_at: float
    may_join: bool
    is_announced: bool = False


@dataclass(eq=False)
class Joining:
    """
    Used on the scheduler's thread. `step_tokens`: the most placeholders of loads that join one step; 0 where
    vLLM has one step in flight only: then nothing is gained.
    """

    step_tokens: int = 0
    due: list[str] = field(default_factory=list)  # loads that join the next step
    _in_flight: deque[_StepInFlight] = field(default_factory=deque)
    _seconds: dict[int, deque[float]] = field(default_factory=dict)  # of steps, by the size of the step
    _ended_at: float = 0.0  # the last step
    _per_byte: deque[float] = field(default_factory=lambda: deque(maxlen=_SEEN))  # of loads
    _late_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SEEN))
    _loads: dict[str, _LoadUnderWay] = field(default_factory=dict)
    _num_joining: int = 0  # placeholders of those that join the step that is planned
    _has_failed: bool = False

    def take(self, num_bytes: int, num_placeholders: int) -> bool:
        """
        Whether a load that begins now joins the step that is planned: if it will have arrived when the GPU
        reaches that step.
        """
        joins = self._has_room(num_placeholders) and self._fits(self._arrives_at(num_bytes))
        self._num_joining += num_placeholders if joins else 0
        return joins

    def note_load(
        self,
        request_id: str,
        num_bytes: int,
        num_placeholders: int,
        *,
        may_join: bool,
        follows_steps: bool = False,
    ) -> None:
        """A load begins with the next step. `follows_steps`: it may copy what those in flight compute."""
        arrives_at = self._arrives_at(num_bytes) + (self._left_s() if follows_steps else 0.0)
        self._loads[request_id] = _LoadUnderWay(num_bytes, num_placeholders, arrives_at, may_join)

    def note_step(self, number: int, num_tokens: int) -> None:
        """A step is planned."""
        self._num_joining = 0
        if num_tokens:
            self._in_flight.append(_StepInFlight(number, num_tokens, time.perf_counter()))

    def take_arriving(self) -> tuple[str, ...]:
        """The loads that may be announced as arrived with the step that was just planned."""
        arriving = []
        for request_id, load in self._loads.items():
            if load.may_join and not load.is_announced and self._has_room(load.num_placeholders):
                load.is_announced = self._fits(load.arrives_at)
                if load.is_announced:
                    arriving.append(request_id)
        return tuple(arriving)

    def take_due(self, requests: Mapping[str, TicketedRequest]) -> tuple[str, ...]:
        """The loads that join the step that is planned, if their requests still need them."""
        due, self.due = self.due, []
        joining = []
        for request_id in due:
            ticketed = requests.get(request_id)
            if ticketed is not None and ticketed.state is State.LOADING:
                ticketed.join()
            if ticketed is not None and ticketed.state is State.JOINED:
                joining.append(request_id)
        self.note_due(joining)
        return tuple(joining)

    def note_due(self, request_ids: Collection[str]) -> None:
        """They join the step that is planned."""
        for request_id in request_ids:
            self._loads[request_id].num_placeholders = 0

    def note_end(self, number: int) -> None:
        """vLLM has read what a step sampled, so it and all earlier ones have ended."""
        now = time.perf_counter()
        while self._in_flight and self._in_flight[0].number <= number:
            step = self._in_flight.popleft()
            began = max(step.planned_at, self._ended_at)
            like = self._seconds.setdefault(step.num_tokens.bit_length(), deque(maxlen=_SEEN))
            like.append(now - began)
            self._ended_at = now

    def note_copied(self, request_id: str, seconds: float) -> None:
        """Note how long the copies of a load took by themselves. Called before its result is noted."""
        load = self._loads.get(request_id)
        if load is not None and load.num_bytes and seconds:
            self._per_byte.append(seconds / load.num_bytes)

    def note_result(self, request_id: str, result: LoadResult) -> None:
        """A load has ended."""
        if self._loads.pop(request_id, None) is not None:
            self._late_s.append(result.late_s)

    def note_failure(self) -> None:
        """A load that had joined a step failed, which vLLM cannot hear of: none joins any more."""
        self._has_failed = True

    def _has_room(self, num_placeholders: int) -> bool:
        announced = sum(load.num_placeholders for load in self._loads.values() if load.is_announced)
        return not self._has_failed and self._num_joining + announced + num_placeholders <= self.step_tokens

    def _arrives_at(self, num_bytes: int) -> float:
        """After the loads under way. Copies from vLLM's own blocks take next to nothing."""
        begins = max([time.perf_counter(), *(load.arrives_at for load in self._loads.values())])
        if not num_bytes:
            return begins
        return begins + _MARGIN * max(self._per_byte, default=float("inf")) * num_bytes

    def _fits(self, arrives_at: float) -> bool:
        """Return whether the GPU computes the steps in flight until then."""
        needed_s = arrives_at - time.perf_counter() + _MARGIN_S + max(self._late_s, default=0.0)
        return needed_s < self._left_s()

    def _left_s(self) -> float:
        """Return the least seconds that the steps in flight still take."""
        if not self._in_flight:
            return 0.0
        began = max(self._in_flight[0].planned_at, self._ended_at)
        until = began + sum(self._least_s(step.num_tokens) for step in self._in_flight)
        return max(0.0, until - time.perf_counter())

    def _least_s(self, num_tokens: int) -> float:
        """The shortest of the last steps of at least half as many tokens, or of fewer if there were none."""
        sizes = [size for size in self._seconds if size <= num_tokens.bit_length()]
        return min(self._seconds[max(sizes)]) if sizes else 0.0
