"""
Which loads join a step: vLLM may compute the request's tail in a step that begins before its copies have
arrived, because the GPU still computes earlier ones. The worker waits for the copies and computes the
placeholders before that step's forward pass.

    the GPU    [ step 7 ..... ][ step 8, 8,192 tokens ........ ][ pass, step 9 ][ pass, step 10 ]
    the host    plans 8         plans 9: copies [=====] of load A                plans 10: B's tail
                                plans 9: copies of load B [============]
                A joins at once, as its copies fit into what step 8 still takes
                B does not, but they fit into steps 8 and 9: it is announced to vLLM with step 9

While the copies of a load that joins are on their way, vLLM's thread waits; if they are late, so does the
GPU. So the time left is estimated by the shortest of similar steps, and the time of the copies by the slowest
of the last loads, with a margin. If the GPU still has to wait, that time is measured and added to the margin.

If nothing is in flight, a load that copies from vLLM's blocks only joins the step being planned, too: these
copies take the GPU a few milliseconds, and vLLM's thread does not wait for them. Otherwise the request would
wait for the steps in which vLLM hears of its load.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvshare.vllm_connector.metadata import LoadResult
from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest

_SEEN = 8  # times that are remembered for each size of steps, and for loads
_MARGIN = 1.25  # factor on the time of copies
_MARGIN_S = 0.002  # for the host, which plans and launches a step


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    number: int
    num_tokens: int
    planned_at: float


@dataclass(slots=True)
class _LoadUnderWay:
    """`may_join`: whether it may join a step at all. `is_announced`: it was announced to vLLM as arrived."""

    num_bytes: int
    num_placeholders: int
    arrives_at: float
    may_join: bool
    is_announced: bool = False


@dataclass(eq=False)
class Joining:
    """
    Used on the scheduler's thread. `step_tokens`: the most placeholders of loads that join one step; 0 if
    vLLM has only one step in flight, because joining would gain nothing.
    """

    step_tokens: int = 0
    due: list[str] = field(default_factory=list)  # loads that join the next step
    _in_flight: deque[_StepInFlight] = field(default_factory=deque)
    _seconds: dict[int, deque[float]] = field(default_factory=dict)  # of steps, by the size of the step
    _ended_at: float = 0.0  # when the last step ended
    _per_byte: deque[float] = field(default_factory=lambda: deque(maxlen=_SEEN))  # seconds, of the last loads
    _late_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SEEN))
    _loads: dict[str, _LoadUnderWay] = field(default_factory=dict)
    _num_joining: int = 0  # placeholders of loads that join the step being planned
    _has_failed: bool = False

    def take(self, num_bytes: int, num_placeholders: int) -> bool:
        """
        Return whether a load that begins now joins the step being planned: it does if it will have arrived
        when the GPU reaches that step, or if the GPU is idle and the load reads no host memory.
        """
        is_at_once = not num_bytes and self._is_idle and self.step_tokens > 0
        fits = is_at_once or self._fits(self._arrives_at(num_bytes))
        joins = fits and self._has_room(num_placeholders)
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
        """Note a load that begins with the next step. `follows_steps`: it waits for the steps in flight."""
        arrives_at = self._arrives_at(num_bytes) + (self._left_s() if follows_steps else 0.0)
        self._loads[request_id] = _LoadUnderWay(num_bytes, num_placeholders, arrives_at, may_join)

    def note_step(self, number: int, num_tokens: int) -> None:
        """Note a planned step, of `num_tokens` of vLLM."""
        self._num_joining = 0
        if num_tokens:
            self._in_flight.append(_StepInFlight(number, num_tokens, time.perf_counter()))

    def take_arriving(self) -> tuple[str, ...]:
        """Return the loads to announce as arrived with the step that was just planned."""
        arriving = []
        for request_id, load in self._loads.items():
            if load.may_join and not load.is_announced and self._has_room(load.num_placeholders):
                load.is_announced = self._fits(load.arrives_at)
                if load.is_announced:
                    arriving.append(request_id)
        return tuple(arriving)

    def take_due(self, requests: Mapping[str, TicketedRequest]) -> tuple[str, ...]:
        """Return the loads that join the step being planned, if their requests still need them."""
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
        """Note that loads join the step being planned: their placeholders need no room in later ones."""
        for request_id in request_ids:
            self._loads[request_id].num_placeholders = 0

    def note_end(self, number: int) -> None:
        """Note that vLLM has read what a step sampled: this step and all earlier ones have ended."""
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
        """Note the end of a load, and how long the GPU waited for it."""
        load = self._loads.pop(request_id, None)
        if load is not None and load.num_bytes:  # nobody waits for copies from blocks
            self._late_s.append(result.late_s)

    def note_failure(self) -> None:
        """Let no load join any more: one that had joined a step failed, which cannot be reported to vLLM."""
        self._has_failed = True

    def _has_room(self, num_placeholders: int) -> bool:
        announced = sum(load.num_placeholders for load in self._loads.values() if load.is_announced)
        return not self._has_failed and self._num_joining + announced + num_placeholders <= self.step_tokens

    @property
    def _is_idle(self) -> bool:
        """Return whether the GPU computes no step, and no load from host memory is under way."""
        return not self._in_flight and not any(load.num_bytes for load in self._loads.values())

    def _arrives_at(self, num_bytes: int) -> float:
        """Estimate when a load of so many bytes from host memory arrives: after all loads under way."""
        begins = max([time.perf_counter(), *(load.arrives_at for load in self._loads.values())])
        if not num_bytes:
            return begins
        return begins + _MARGIN * max(self._per_byte, default=float("inf")) * num_bytes

    def _fits(self, arrives_at: float) -> bool:
        """Return whether the GPU will still compute the steps in flight then."""
        needed_s = arrives_at - time.perf_counter() + _MARGIN_S + max(self._late_s, default=0.0)
        return needed_s < self._left_s()

    def _left_s(self) -> float:
        """Return the least time that the steps in flight still take."""
        if not self._in_flight:
            return 0.0
        began = max(self._in_flight[0].planned_at, self._ended_at)
        until = began + sum(self._least_s(step.num_tokens) for step in self._in_flight)
        return max(0.0, until - time.perf_counter())

    def _least_s(self, num_tokens: int) -> float:
        """Return the time of the shortest of the last steps of about this size, or of the next smaller."""
        sizes = [size for size in self._seconds if size <= num_tokens.bit_length()]
        return min(self._seconds[max(sizes)]) if sizes else 0.0
