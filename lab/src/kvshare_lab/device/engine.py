"""
vLLM's engine core in virtual time: its own scheduler, with async scheduling and two steps in flight, and the
connector's two sides. A forward pass takes what the profile says.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvshare.vllm_connector.metadata import StepMetadata
from kvshare_lab.device.gpu import SimulatedGpu
from kvshare_lab.device.worker import SimulatedWorker

_IN_FLIGHT = 2  # steps
_TOKEN = 7  # that every request samples


class _Step(NamedTuple):
    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    done_at: float


@dataclass(eq=False)
class Answer:
    """When a request's tokens came. Units: seconds of virtual time."""

    request_id: str
    sent_at: float
    token_at: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_at, self.token_at[1:], strict=False)]


class Engine:
    """`on_answer` is called with each answer that is complete; it may send more."""

    def __init__(
        self, gpu: SimulatedGpu, scheduler: Scheduler, worker: SimulatedWorker | None, *, bytes_per_token: int
    ) -> None:
        self.gpu, self.scheduler, self.worker = gpu, scheduler, worker
        self._bytes_per_token = bytes_per_token
        self._clock = gpu.clock
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._steps: deque[_Step] = deque()
        self._running: dict[str, tuple[Request, Answer]] = {}
        self.scheduling_s = 0.0  # of this machine's CPU, with the connector's scheduler side
        self.on_answer: Callable[[Answer], None] = lambda answer: None

    def at(self, due_at: float, action: Callable[[], None]) -> None:
        """Have something done at this time, or once the step that runs then is scheduled."""
        heapq.heappush(self._due, (due_at, next(self._numbers), action))

    def send(self, make: Callable[[], Request], answer: Answer, *, arrives_at: float) -> None:
        """A request reaches the engine at this time; it is made only then."""
        self.at(arrives_at, lambda: self._admit(make(), answer))

    def run(self) -> None:
        """Until every request is answered and saved."""
        with self.gpu:
            while self._due or self._steps or self.scheduler.has_requests():
                while self._due and self._due[0][0] <= self._clock.now():
                    _, _, action = heapq.heappop(self._due)
                    action()
                if self._steps or self.scheduler.has_requests():
                    self._turn()
                elif self._due:
                    self._clock.sleep_until(self._due[0][0])

    def _admit(self, request: Request, answer: Answer) -> None:
        self._running[request.request_id] = request, answer
        self.scheduler.add_request(request)

    def _turn(self) -> None:
        """As `EngineCore.step_with_batch_queue` does."""
        if self.scheduler.has_requests():
            began = time.process_time()
            scheduled = self.scheduler.schedule()
            self.scheduling_s += time.process_time() - began
            self._steps.append(self._execute(scheduled))
            has_more = scheduled.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            if len(self._steps) < _IN_FLIGHT and has_more:
                return
        step = self._steps.popleft()
        self._clock.sleep_until(step.done_at)
        began = time.process_time()
        self.scheduler.update_from_output(step.scheduled, step.output)
        self.scheduling_s += time.process_time() - began
        self._note_tokens(step.output)

    def _execute(self, scheduled: SchedulerOutput) -> _Step:
        """Launch a step. Like vLLM's runner, the connector works before and after the forward pass."""
        worker, metadata = self.worker, scheduled.kv_connector_metadata
        if worker is not None and isinstance(metadata, StepMetadata):
            self._clock.spend(self._scheduling_s(metadata))
            worker.begin(metadata)
        sampled = self._forward(scheduled)
        output = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        )
        if worker is not None and isinstance(metadata, StepMetadata):
            worker.advance(metadata)
            worker.save(metadata)
            output.kv_connector_output = _reported(worker)
        # Without a forward pass nothing is sampled, so the step does not wait for the device.
        done_at = self.gpu.reached_at() if sampled else self._clock.now()
        return _Step(scheduled, output, done_at)

    def _scheduling_s(self, metadata: StepMetadata) -> float:
        """What the blocks of loads take the scheduler."""
        costs, loads = self.gpu.costs, metadata.loads
        read = (len(source.block_ids) for load in loads for source in load.sources.values())
        num_blocks = sum(len(load.block_ids) for load in loads)
        return num_blocks * costs.scheduled_block_s + sum(read) * costs.source_block_s

    def _forward(self, scheduled: SchedulerOutput) -> dict[str, list[int]]:
        """The forward pass of a step. Its requests sample a token once their prompt is computed."""
        if not scheduled.total_num_scheduled_tokens:
            self._clock.spend(self.gpu.costs.empty_step_s)
            return {}
        cached = scheduled.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        parts = {
            request_id: (before[request_id], before[request_id] + num_tokens)
            for request_id, num_tokens in scheduled.num_scheduled_tokens.items()
        }
        self.gpu.launch(self.gpu.costs.step_s(parts.values(), bytes_per_token=self._bytes_per_token))
        return {
            request_id: [_TOKEN] if after >= self._running[request_id][0].num_prompt_tokens else []
            for request_id, (_, after) in parts.items()
        }

    def _note_tokens(self, output: ModelRunnerOutput) -> None:
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if not tokens or request_id not in self._running:
                continue
            request, answer = self._running[request_id]
            answer.token_at.append(self._clock.now())
            if request.is_finished():
                del self._running[request_id]
                self.on_answer(answer)


def _reported(worker: SimulatedWorker) -> KVConnectorOutput:
    results: Any = worker.take_transfers()
    return KVConnectorOutput(
        finished_sending=results.finished_sending or None,
        finished_recving=results.finished_recving or None,
        failed_recving=results.failed_recving,
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
