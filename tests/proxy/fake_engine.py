"""
An engine without a model: a byte tokenizer, an echo of the last message, and prefix sharing per namespace.

It is behind the real interface and keeps the real rules (slots, a queue, isolation), so that the front is
tested against behaviour. `Behaviour` makes it slow or makes it fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvshare.conversation.chat import Chat
from kvshare.conversation.tools import ToolFormat
from kvshare.engine import (
    Delta,
    Embeddings,
    Event,
    Finished,
    FinishReason,
    GeneratingEngine,
    GenerationRequest,
    SamplingParams,
    Started,
    TokenLogprob,
)
from kvshare.errors import ContextLengthError, ErrorCode, OverloadedError, RequestError
from kvshare.namespace import Namespace
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prompt, SharingMode, SharingReport, StoredPrompt
from kvshare.status import EngineStatus, ModelCard
from kvshare.telemetry import Telemetry
from tests.proxy.small_store import SmallStore
from vector_index import PromptText

MODEL = "echo"
VOCABULARY = 256


@dataclass
class Behaviour:
    """What the engine does beside echoing."""

    start_s: float = 0.0
    start_error: Exception | None = None
    plan_s: float = 0.0  # before Started
    prefill_s: float = 0.0  # after Started
    token_s: float = 0.0
    refuse: Exception | None = None  # instead of Started
    refuse_prompt: Exception | None = None  # by the tokenizer
    fail_after_tokens: int | None = None
    failure: Exception = field(default_factory=lambda: RuntimeError("the prompt was: SECRET"))
    has_no_embedder: bool = False
    end_early: bool = False  # ends without its last event
    says: str | None = None  # instead of an echo
    max_model_len: int = 1000
    max_running: int = 4
    max_waiting: int = 4


class FakeEngine(SmallStore, GeneratingEngine):
    """Echoes the last message, one token per character."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        super().__init__()
        self.behaviour = behaviour or Behaviour()
        self.stored: dict[str, list[tuple[int, ...]]] = {}  # namespace digest -> prompts
        self.requests: list[GenerationRequest] = []
        self.chats: list[Chat] = []
        self.num_running = 0
        self.num_waiting = 0
        self.num_freed = 0
        self.freed = asyncio.Event()
        self.running = asyncio.Event()
        self.is_started = False
        self.is_stopped = False
        self.telemetry = Telemetry()
        self._slots = asyncio.Semaphore(self.behaviour.max_running)

    @property
    def card(self) -> ModelCard:
        return ModelCard(MODEL, created=1_700_000_000, max_model_len=self.behaviour.max_model_len)

    async def start(self) -> None:
        await asyncio.sleep(self.behaviour.start_s)
        if self.behaviour.start_error is not None:
            raise self.behaviour.start_error
        self.is_started = True

    async def stop(self) -> None:
        self.is_stopped = True

    @property
    def tool_format(self) -> ToolFormat:
        return ToolFormat.HERMES

    @property
    def added_tokens(self) -> Mapping[str, int]:
        return {}

    def namespace(self, *, tenant: str, scope: str, salt: str = "") -> Namespace:
        return Namespace(
            tenant=tenant,
            scope=scope,
            salt=salt,
            model=MODEL,
            revision="0",
            tokenizer="bytes",
            dtype="float32",
            kv_layout="none",
            rope="none",
        )

    async def encode_chat(self, chat: Chat) -> Prompt:
        if self.behaviour.refuse_prompt is not None:
            raise self.behaviour.refuse_prompt
        self.chats.append(chat)
        text = "".join(f"<{message['role']}>{message['content']}" for message in chat.messages)
        return self._prompt(list(text.encode()), last=chat.messages[-1]["content"])

    async def encode_text(self, text: str) -> Prompt:
        return self._prompt(list(text.encode()), last=text)

    async def encode_tokens(self, token_ids: Sequence[int]) -> Prompt:
        if any(token >= VOCABULARY for token in token_ids):
            raise RequestError(f"A token id is outside the vocabulary of {VOCABULARY}.", param="prompt")
        return self._prompt(list(token_ids), last=bytes(token_ids).decode("utf-8", "replace"))

    async def decode_tokens(self, token_ids: Sequence[int]) -> str:
        if any(token >= VOCABULARY for token in token_ids):
            raise RequestError(f"A token id is outside the vocabulary of {VOCABULARY}.", param="tokens")
        return bytes(token_ids).decode("utf-8", "replace")

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """A text's vector points to its length."""
        if self.behaviour.has_no_embedder:
            raise RequestError("this server has no embedder", code=ErrorCode.NO_EMBEDDER)
        vectors = np.zeros((len(texts), 8), dtype=np.float32)
        vectors[range(len(texts)), [len(text) % 8 for text in texts]] = 1.0
        return Embeddings("lengths", vectors, tuple(len(text) for text in texts))

    def _prompt(self, token_ids: list[int], *, last: str) -> Prompt:
        return Prompt(np.array(token_ids, dtype=np.int32), PromptText(last_user_turn=last, body=last))

    async def generate(self, request: GenerationRequest, emit: Callable[[Event], None]) -> None:
        self.requests.append(request)
        self._check(request)
        if self.num_waiting >= self.behaviour.max_waiting and self._slots.locked():
            raise OverloadedError("The queue is full.")
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        self.running.set()
        stored = StoredPrompt()
        try:
            async for event in self._events(request, stored):
                emit(event)
            stored.node = 1 + sum(map(len, self.stored.values())) if request.store else None
        finally:
            stored.is_settled = True
            self.num_running -= 1
            self.num_freed += 1
            self._slots.release()
            self.freed.set()

    def _check(self, request: GenerationRequest) -> None:
        if self.behaviour.refuse is not None:
            raise self.behaviour.refuse
        num_tokens = request.prompt.num_tokens
        max_tokens = request.sampling.max_tokens or 1
        if num_tokens + max_tokens > self.behaviour.max_model_len:
            raise ContextLengthError(
                num_prompt_tokens=num_tokens,
                max_tokens=max_tokens,
                max_model_len=self.behaviour.max_model_len,
            )

    async def _events(self, request: GenerationRequest, stored: StoredPrompt) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(self.behaviour.plan_s)
        report = self._plan(request)
        yield Started(report, stored)
        await asyncio.sleep(self.behaviour.prefill_s)
        said = self.behaviour.says or request.prompt.text.last_user_turn
        text, finish_reason, stop = answer_to(said, request.sampling)
        num_tokens = 0
        for number, character in enumerate(text):
            for choice in range(request.sampling.n):
                if num_tokens == self.behaviour.fail_after_tokens:
                    raise self.behaviour.failure
                await asyncio.sleep(self.behaviour.token_s)
                logprobs = _logprobs(character, number, request.sampling.logprobs)
                if number < len(text) - 1:
                    yield Delta(choice, character, 1, logprobs)
                else:
                    yield Delta(choice, character, 1, logprobs, finish_reason, stop)
                num_tokens += 1
        if not text:
            for choice in range(request.sampling.n):
                yield Delta(choice, "", 0, (), finish_reason, stop)
        if self.behaviour.end_early:
            return
        yield Finished(report, num_tokens, {"plan": 0.001, "recompute": 0.01, "tokenize": 9.0})

    def _plan(self, request: GenerationRequest) -> SharingReport:
        token_ids = tuple(request.prompt.token_ids.tolist())
        prompts = self.stored.setdefault(request.namespace.digest, [])
        num_exact = num_copied = 0
        if request.mode is not SharingMode.OFF:
            num_exact = max((_common_prefix(token_ids, other) for other in prompts), default=0)
            num_exact = min(num_exact, len(token_ids) - 1)
        if request.mode is SharingMode.APPROX and num_exact:
            num_copied = (len(token_ids) - num_exact) // 2
        if request.store:
            prompts.append(token_ids)
        decision = Decision.APPROX if num_copied else Decision.EXACT if num_exact else Decision.FULL
        num_left = len(token_ids) - num_exact - num_copied
        return SharingReport(
            num_exact=num_exact,
            num_copied=num_copied,
            num_recomputed=num_left - min(1, num_left - 1),
            num_repaired=min(1, num_left - 1),
            decision=decision,
            reason=None if decision is not Decision.FULL else Reason.NO_CANDIDATES,
            donors=(4711,),
        )

    def status(self) -> EngineStatus:
        return EngineStatus(
            ready=self.is_started,
            detail="echoing",
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_nodes=sum(len(prompts) for prompts in self.stored.values()),
            num_segments=0,
            kv_bytes=0,
            kv_budget_bytes=1024,
            max_depth=1,
            counts=self.telemetry.counts(),
        )

    async def explain(self, request: GenerationRequest) -> dict[str, Any]:
        return {"prompt_tokens": request.prompt.num_tokens, "mode": request.mode}


def answer_to(text: str, sampling: SamplingParams) -> tuple[str, FinishReason, str | None]:
    """What the engine says: the text up to a stop string or the token limit; and which stop string it was."""
    ends = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
    end, stop = min(ends) if ends else (len(text), None)
    if sampling.max_tokens is not None and end > sampling.max_tokens:
        return text[: sampling.max_tokens], FinishReason.LENGTH, None
    return text[:end], FinishReason.STOP, stop


def _logprobs(character: str, offset: int, num_top: int | None) -> tuple[TokenLogprob, ...]:
    if num_top is None:
        return ()
    raw = character.encode("utf-8", "surrogatepass")
    top = tuple(
        TokenLogprob(rank, chr(97 + rank), bytes([97 + rank]), -1.0 - rank) for rank in range(num_top)
    )
    return (TokenLogprob(ord(character) % VOCABULARY, character, raw, float("-inf"), top, offset),)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
