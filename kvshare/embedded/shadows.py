"""
Shadows: some answers from approximate KV are computed once more in full, after they were sent, to measure how
far they deviate.

The measure is the lab's: KL of the full prefill's next-token distribution to that of the answer, in nats,
mean over the answer's first tokens. Nothing of a shadow is stored, and its client waits for nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from delta_tree import TokenIds
from kvshare.embedded.decoder import DecoderModel, RunningPrefill, RunningSequence
from kvshare.embedded.recording import Recording
from kvshare.embedded.scheduler import Scheduler
from kvshare.embedded.task import Task
from kvshare.requests import Decision, SharingReport, StoredPrompt
from kvshare.sharing.cost import CostModel
from kvshare.sharing.plan import NoPlan
from kvshare.status import ShadowStatus


@dataclass(eq=False, repr=False, kw_only=True)
class Shadow:
    """A task of the scheduler: the prompt in full, then the tokens of the answer that was given."""

    prompt: TokenIds
    recording: Recording
    model: DecoderModel[Any]
    cost: CostModel
    tenant: str
    released: asyncio.Event = field(default_factory=asyncio.Event)
    prefilled: bool = False
    cancelled: bool = False
    is_pending: bool = False  # as a task is whose grammar decides
    deviations: list[float] = field(default_factory=list)  # nats, of each token
    _kv: RunningSequence | None = None
    _running: RunningPrefill | None = None

    @property
    def num_remaining(self) -> int:
        """As a prompt that has just begun: the shorter ones of requests go first."""
        return len(self.prompt)

    def advance(self, *, max_queries: int) -> bool:
        """Compute a chunk of the prompt, or a token of the answer. Returns whether there is more to do."""
        if self._kv is None or self._running is None:
            self._kv = self.model.new_sequence(len(self.prompt) + len(self.recording.token_ids))
            self._running = self.model.prefill(self.prompt, NoPlan(), self._kv)
        logits: torch.Tensor | None
        if not self.prefilled:
            _, logits = self._running.advance(max_queries=max_queries)
            self.prefilled = logits is not None
        else:
            place = len(self.deviations) - 1
            logits = self.model.next_logits(
                self._kv, len(self.prompt) + place, self.recording.token_ids[place]
            )
        if logits is not None:
            found = self.recording.logprobs[len(self.deviations)]
            self.deviations.append(_divergence(logits.log_softmax(-1).cpu(), found))
        return len(self.deviations) < len(self.recording.token_ids)

    def settle(self) -> bool:
        return False

    def end(self, error: BaseException | None) -> None:
        """Note on the event loop that the worker has released it."""
        self._kv = self._running = None
        self.released.set()


class Shadows:
    """
    Chooses answers, has them computed one at a time, and adds up what was found. Runs on the event loop.

    `share`: of the approximate answers.
    """

    def __init__(self, share: float, *, draw: Callable[[], float] = random.random) -> None:
        self.share = share
        self._draw = draw
        self._is_busy = False
        self._found: list[float] = [0.0, 0.0, 0.0]  # sums of measured and expected deviations; the largest
        self._num, self._num_above, self._num_left_out = 0, 0, 0

    def recording(self, report: SharingReport) -> Recording | None:
        """Return what the distributions of an answer are recorded in; None if it is not chosen."""
        if report.decision is not Decision.APPROX or report.prediction is None or self._draw() >= self.share:
            return None
        return Recording()

    async def compare(
        self, task: Task, report: SharingReport, stored: StoredPrompt, scheduler: Scheduler
    ) -> None:
        """Compute a shadow of an answer that has ended, unless another one is being computed."""
        recording, prediction = task.recording, report.prediction
        if recording is None or prediction is None or not recording.token_ids or task.error is not None:
            return
        if self._is_busy:
            self._num_left_out += 1
            return
        self._is_busy = True
        try:
            shadow = Shadow(
                prompt=task.request.prompt.token_ids,
                recording=recording,
                model=task.model,
                cost=task.cost,
                tenant=task.tenant,
            )
            scheduler.submit(shadow)
            await shadow.released.wait()
        except RuntimeError:  # the engine was stopped meanwhile
            return
        finally:
            self._is_busy = False
        if len(shadow.deviations) == len(recording.token_ids):
            stored.deviation = sum(shadow.deviations) / len(shadow.deviations)
            self._add(stored.deviation, prediction.expected, limit=prediction.limit)

    def _add(self, measured: float, expected: float, *, limit: float) -> None:
        self._num += 1
        self._num_above += measured > limit
        before, of_expected, largest = self._found
        self._found = [before + measured, of_expected + expected, max(largest, measured)]

    def status(self) -> ShadowStatus:
        return ShadowStatus(self.share, self._num, self._num_above, self._num_left_out, *self._found)


def _divergence(right: torch.Tensor, found: torch.Tensor) -> float:
    """Return the KL of two distributions in nats. Shapes:  log-probabilities (V,) of each"""
    differences = torch.where(right.isneginf(), 0.0, right.exp() * (right - found))
    return max(0.0, float(differences.sum()))  # rounding may be below 0
