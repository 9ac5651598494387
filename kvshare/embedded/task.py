"""
A request in the engine: what the scheduler advances, one quantum at a time.

Not thread-safe: a task belongs to the worker thread until `released`, and then to `Retention`, which stores
its KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from delta_tree import SegmentId, TokenIds, token_ids
from kvshare.embedded.ahead_prefill import AheadPrefill
from kvshare.embedded.choice import Choice, Decoding, token_text
from kvshare.embedded.decoder import DecoderModel, RunningPrefill, RunningSequence
from kvshare.embedded.recording import Recording
from kvshare.embedded.sampling import top_logprobs
from kvshare.engine import Delta, GenerationRequest, TokenLogprob
from kvshare.kv.sequence import SegmentKV, SequenceKV
from kvshare.kv.tier import Fetched
from kvshare.requests import SharingReport
from kvshare.sharing.cost import CostModel
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.memory_keeper import Computed
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import PrefillWork
from kvshare.sharing.splitting import without_late


@dataclass(eq=False, repr=False, kw_only=True)
class Task:
    """A request's state in the engine: first prefilling, then decoding its choices in turn."""

    request: GenerationRequest
    lookup: InitVar[Lookup]
    model: DecoderModel[Any]
    decoding: Decoding
    cost: CostModel
    emit: Callable[[Delta], object]  # on the event loop
    # There, too, when all slots of the prompt are valid and the answer goes on.
    on_prefilled: Callable[[], object] = lambda: None
    call_soon: Callable[..., object]  # calls on the event loop
    recording: Recording | None = None  # of the first choice, if it is to be compared with a full prefill
    released: asyncio.Event = field(default_factory=asyncio.Event)
    prefilled: bool = False
    cancelled: bool = False  # set by any thread, read between quanta
    error: BaseException | None = None  # the failure that ended it; None: it is complete, or was cancelled

    def __post_init__(self, lookup: Lookup) -> None:
        self.plan = self._carried_out = lookup.plan  # the second without what was read too late
        self.stage_seconds = dict(lookup.stage_seconds)
        self.num_remaining = self._num_to_compute  # tokens of the prefill that are not computed yet
        self._lookup: Lookup | None = lookup
        self._reads = lookup.reads  # until it is over
        self._prompt = self.request.prompt.token_ids
        self._kv: RunningSequence | None = None
        self._running: RunningPrefill | None = None
        self._choices: list[Choice] = []
        self._last_deltas: list[Delta] = []  # those with which the answer ends
        self._taught: tuple[PrefillWork, float] | None = None  # a prefill that costs were not learned from
        self._unused_logits: dict[int, torch.Tensor] = {}  # of choices that wait for their grammar's mask

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def _num_to_compute(self) -> int:
        """Return the number of tokens that the prefill computes, also to choose repairs."""
        if isinstance(self._carried_out, Plan):
            return self._carried_out.num_computed + self._carried_out.num_selecting
        return self.request.prompt.num_tokens

    @property
    def _work(self) -> PrefillWork:
        return (
            self._carried_out.work()
            if isinstance(self._carried_out, Plan)
            else PrefillWork.full(self.request.prompt.num_tokens)
        )

    @property
    def report(self) -> SharingReport:
        """Count the prompt's tokens by where their KV comes from, without what was read too late."""
        return Lookup(self._carried_out).report(self.request.prompt.num_tokens)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.generated) for choice in self._choices)

    @property
    def computed(self) -> Computed[SegmentKV]:
        """Return the tokens and KV of the first choice: the prompt, and all generated tokens but the last."""
        generated = np.asarray(self._choices[0].generated[:-1], dtype=np.int32)
        return self._computed(token_ids(np.concatenate([self._prompt, generated])))

    @property
    def computed_prompt(self) -> Computed[SegmentKV]:
        """
        The tokens and KV of the prompt, once it is prefilled. Its slots do not change while the answer is
        generated, so another thread may read them meanwhile.
        """
        return self._computed(self._prompt)

    def _computed(self, tokens: TokenIds) -> Computed[SegmentKV]:
        kv = self._choices[0].kv
        assert self._running is not None
        assert isinstance(kv, SequenceKV)
        return Computed(self.request.namespace.digest, tokens, self._running.plan, kv)

    def end(self, error: BaseException | None) -> None:
        """Note on the event loop that the worker has released the task: its last deltas are the last."""
        self.error = error
        for delta in self._last_deltas:
            self.emit(delta)
        if self._reads is not None:
            self._reads.cancel()
            self._running = None
        self.on_prefilled = lambda: None  # breaks a reference cycle with `Retention`, which would hold the KV
        for choice in self._choices[1:]:
            # Only the first choice is stored; this frees the KV of the others.
            choice.kv = self._choices[0].kv
        self.released.set()

    def advance(self, *, max_queries: int) -> bool:
        """Run one quantum and emit its deltas. Returns whether there is more to do."""
        if not self.prefilled:
            self._prefill(max_queries)
        else:
            for choice in self._unfinished():
                self._settle(choice, waits=True)
                if not choice.is_pending and choice.finish_reason is None:
                    self._take_token(choice, self._next_logits(choice))
        return not self.prefilled or bool(self._unfinished())

    @property
    def is_pending(self) -> bool:
        """Return whether a choice's grammar has yet to say if its last token completes the answer."""
        return any(choice.is_pending for choice in self._choices)

    def settle(self) -> bool:
        """End the choices whose grammars say by now that they are complete. Returns whether more is to do."""
        for choice in self._unfinished():
            self._settle(choice, waits=False)
        return bool(self._unfinished())

    def _unfinished(self) -> list[Choice]:
        return [choice for choice in self._choices if choice.finish_reason is None]

    def _prefill(self, max_queries: int) -> None:
        if self._running is None:
            self._running = self._begun()
        began = time.perf_counter()
        num_computed, logits = self._running.advance(max_queries=max_queries)
        if num_computed:  # else it waited for reads
            self._add_to_stage("recompute", time.perf_counter() - began)
            self.num_remaining = max(1, self.num_remaining - num_computed)
        if logits is not None:
            self.prefilled = True
            self.num_remaining = 0
            self._start_choices(logits)
            self._taught = self._work, self.stage_seconds["recompute"]
            if self._unfinished():  # else nothing else is done before the answer is out
                self.call_soon(self.on_prefilled)
                self.learn()

    @property
    def teaches(self) -> bool:
        """Return whether `learn` has something to do."""
        return self._taught is not None

    def learn(self) -> None:
        """Learn from what the prefill took, once. In any thread, but not while the worker has the task."""
        taught, self._taught = self._taught, None
        if taught is not None:
            self.cost.observe(*taught)

    def _begun(self) -> RunningPrefill:
        """Begin in a new sequence, with all KV that is in memory, and room for some tokens of the answer."""
        self._kv = self.model.new_sequence(len(self._prompt) + min(self.decoding.max_tokens, 256))
        lookup, self._lookup = self._lookup, None  # so that the segments are freed once they are copied
        plan = self.plan
        if lookup is None or isinstance(plan, NoPlan):
            return self.model.prefill(self._prompt, plan, self._kv)
        if self._reads is None:
            self._write_copies(plan, lookup.segments)
            return self.model.prefill(self._prompt, plan, self._kv)
        beginning = self.model.prefill(self._prompt[: plan.num_ahead], NoPlan(), self._kv)
        return AheadPrefill(beginning, plan, self._reads, partial(self._after_reads, plan))

    def _after_reads(self, plan: Plan, fetched: Fetched, waited_s: float) -> None:
        """Begin what comes after the part that was computed while KV was read. What is late is computed."""
        self._reads = None
        self._add_to_stage("fetch", waited_s)
        self._carried_out = without_late(plan, fetched.late | fetched.missing)
        self.num_remaining = max(1, self._num_to_compute - plan.num_ahead)
        if isinstance(self._carried_out, Plan):
            self._write_copies(self._carried_out, fetched.segments)
        self._running = self.model.prefill(
            self._prompt, self._carried_out, self._kv, num_computed=plan.num_ahead
        )

    def _write_copies(self, plan: Plan, segments: Mapping[SegmentId, SegmentKV]) -> None:
        """Write all reused KV into the sequence."""
        assert isinstance(self._kv, SequenceKV)
        began = time.perf_counter()
        with torch.inference_mode():
            num_bytes = self._kv.write_copies(plan.copies, segments, computed=plan.may_compute)
        seconds = time.perf_counter() - began
        self.cost.observe_load(num_bytes, seconds)
        self._add_to_stage("write", seconds)

    def _add_to_stage(self, stage: str, seconds: float) -> None:
        self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds

    def _start_choices(self, logits: torch.Tensor) -> None:
        assert self._kv is not None
        for index in range(self.request.sampling.n):
            kv = self._kv if index == 0 else self._kv.fork(len(self._prompt))
            recording = self.recording if index == 0 else None
            choice = Choice(self.request, self.decoding, index=index, kv=kv, recording=recording)
            self._choices.append(choice)
            self._take_token(choice, logits)

    def _settle(self, choice: Choice, *, waits: bool) -> None:
        """End a choice whose grammar says that its last token completes the answer."""
        if not choice.is_pending:
            return
        if (text := choice.settle(waits=waits)) is not None and choice.finish_reason is not None:
            logprobs = choice.logprobs.take(num_shown=choice.num_shown, ended=True)
            self._send(Delta(choice.index, text, 0, logprobs, choice.finish_reason, choice.stops.met))

    def _next_logits(self, choice: Choice) -> torch.Tensor:
        if (logits := self._unused_logits.pop(choice.index, None)) is not None:
            return logits
        position = len(self._prompt) + len(choice.generated) - 1
        return self.model.next_logits(choice.kv, position, choice.generated[-1])

    def _take_token(self, choice: Choice, logits: torch.Tensor) -> None:
        taken = choice.take(logits)
        if taken is None:
            self._unused_logits[choice.index] = logits
            return
        token_id, text = taken
        logprobs = self._logprobs(choice, logits, token_id)
        self._send(Delta(choice.index, text, 1, logprobs, choice.finish_reason, choice.stops.met))

    def _send(self, delta: Delta) -> None:
        """Emit a delta, the last ones with the release that follows: each call wakes the event loop."""
        is_over = len(self._choices) == self.request.sampling.n and not self._unfinished()
        if is_over:
            self._last_deltas.append(delta)
        else:
            self.call_soon(self.emit, delta)

    def _logprobs(self, choice: Choice, logits: torch.Tensor, token_id: int) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the tokens whose text is sent now."""
        k = self.request.sampling.logprobs
        if k is None:
            return ()
        logprob, likeliest = top_logprobs(logits, token_id, k)
        top = tuple(self._describe(other, value) for other, value in likeliest)
        choice.logprobs.add(self._describe(token_id, logprob, top), num_decoded=choice.num_decoded)
        return choice.logprobs.take(num_shown=choice.num_shown, ended=choice.finish_reason is not None)

    def _describe(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text, raw = token_text(self.decoding.tokenizer, token_id)
        return TokenLogprob(token_id, text, raw, logprob, top)
