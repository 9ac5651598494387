"""The embedded engine: admits requests, plans, submits tasks to the scheduler, and stores the computed KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from kvshare.conversation.chat import Chat
from kvshare.conversation.tools import ToolFormat
from kvshare.embedded.admission import Admission
from kvshare.embedded.choice import Decoding
from kvshare.embedded.embeddings import embeddings
from kvshare.embedded.grammar import Constraint
from kvshare.embedded.retention import Retention
from kvshare.embedded.sampling import resolve
from kvshare.embedded.server import EmbeddedServer, Load, load_model, open_server
from kvshare.embedded.shadows import Shadows
from kvshare.embedded.task import Task
from kvshare.engine import (
    Delta,
    Embeddings,
    Event,
    Finished,
    GeneratingEngine,
    GenerationRequest,
    Started,
)
from kvshare.errors import ContextLengthError, EngineError, ErrorCode, RequestError
from kvshare.namespace import Namespace
from kvshare.requests import Prompt, SharingReport
from kvshare.runtime import ServedEngine
from kvshare.settings import Settings
from kvshare.sharing.arrivals import Arrivals
from kvshare.sharing.control import Treatment
from kvshare.sharing.explain import explain_lookup
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan
from kvshare.status import EngineStatus, ModelCard

_MAX_PENDING = 4  # tasks per slot that store a prompt or an answer; if there are more, new requests wait
_SETTLE_S = 0.25  # how long a request waits for its namespace's previous prompts to be stored


class EmbeddedEngine(ServedEngine[EmbeddedServer], GeneratingEngine):
    """One model in this process, with its tokenizer, loaded when the engine starts."""

    def __init__(self, settings: Settings, *, load: Load = load_model) -> None:
        """Opens nothing: `start` does."""
        super().__init__()
        self._settings = settings
        self._load = load
        self._created = int(time.time())
        self._admission = Admission(
            max_running=settings.engine.max_running, max_waiting=settings.engine.max_waiting
        )
        self._arrivals = Arrivals(min_run=settings.sharing.min_run)
        self._shadows = Shadows(settings.control.shadow_share)

    @property
    def card(self) -> ModelCard:
        if self._running is None:
            return ModelCard("unknown until the model is loaded", self._created, 0)
        return ModelCard(self._running.model.name, self._created, self._running.model.max_model_len)

    async def start(self) -> None:
        self._running = await self._opened.enter_async_context(
            open_server(self._settings, self._load, self.tenants)
        )

    def reconfigure(self, settings: Settings) -> None:
        self._admission.max_waiting = settings.engine.max_waiting
        self._shadows.share = settings.control.shadow_share

    async def settle(self) -> None:
        """Wait until all KV is indexed, also that of earlier runs. For benchmarks and tests."""
        await self.server.restoring.settle()
        await self.server.runtime.settle()

    @property
    def tool_format(self) -> ToolFormat:
        return self.server.encoder.tool_format

    @property
    def added_tokens(self) -> Mapping[str, int]:
        return self.server.encoder.added_tokens

    def namespace(self, *, tenant: str, scope: str, salt: str = "") -> Namespace:
        return Namespace(tenant=tenant, scope=scope, salt=salt, **self.server.namespace_fields)

    async def encode_chat(self, chat: Chat) -> Prompt:
        return await self.server.encoded(self.server.encoder.encode_chat, chat)

    async def encode_text(self, text: str) -> Prompt:
        return await self.server.encoded(self.server.encoder.encode_text, text)

    async def encode_tokens(self, token_ids: Sequence[int]) -> Prompt:
        return await self.server.encoded(self.server.encoder.encode_tokens, token_ids)

    async def decode_tokens(self, token_ids: Sequence[int]) -> str:
        return await self.server.off_loop(self.server.encoder.decode_tokens, token_ids)

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        embedder = self.server.runtime.index.embedder
        if embedder is None:
            raise RequestError(
                "this server has no embedder: the setting index.dense is false, or loading it failed",
                code=ErrorCode.NO_EMBEDDER,
            )
        # Not in the executor that tokenizes: the embedder computes one call at a time and would block it.
        return await asyncio.to_thread(embeddings, embedder, texts)

    async def generate(self, request: GenerationRequest, emit: Callable[[Event], None]) -> None:
        decoding = self._decoding(request)
        with self._treated(request) as treatment:
            # Before it has a slot: a grammar that takes long to compile delays no requests of other keys.
            async with self._constraint(request) as constraint, self._admission.slot(request.tenant):
                await self._answer(request, replace(decoding, constraint=constraint), treatment, emit)

    def _treated(self, request: GenerationRequest) -> AbstractContextManager[Treatment]:
        """Let the controller decide how a request is served. It counts as in flight inside the context."""
        runtime, admission = self.server.runtime, self._admission
        if not request.is_controlled or not runtime.sharing.may_share(request.prompt, request.mode):
            return nullcontext(Treatment())
        num_in_flight = admission.num_running + admission.num_waiting + 1
        return runtime.control.take(request.prompt.num_tokens, num_in_flight)

    async def _answer(
        self,
        request: GenerationRequest,
        decoding: Decoding,
        treatment: Treatment,
        emit: Callable[[Event], None],
    ) -> None:
        """Look up, compute and emit. The caller has a slot."""
        server = self.server
        # Ended requests hold their KV until it is stored, so new ones wait if storing is too slow.
        await server.runtime.background.wait_below(_MAX_PENDING * self._settings.engine.max_running)
        lookup = await self._look_up(request, treatment)
        report = lookup.report(request.prompt.num_tokens)
        request = replace(request, store=request.store and self._may_save(request, treatment, report))
        retention = Retention(server, request, self._arrivals)

        def emit_delta(delta: Delta) -> None:
            server.runtime.keeper.telemetry.generated(delta.num_tokens)
            emit(delta)

        task = Task(
            request=request,
            lookup=lookup,
            model=server.model,
            decoding=decoding,
            cost=server.runtime.sharing.cost,
            emit=emit_delta,
            on_prefilled=lambda: retention.store_prompt(task),
            call_soon=asyncio.get_running_loop().call_soon_threadsafe,
            recording=self._shadows.recording(report),
        )
        retention.watch(task)
        self._submit(task, emit, Started(report, retention.stored), retention)
        retention.note_use(lookup)
        del lookup  # the task releases the donors' KV when it has been copied
        await self._released(task, retention)
        treatment.complete(task.num_completion_tokens)
        report = task.report
        emit(Finished(report, task.num_completion_tokens, task.stage_seconds))
        if task.recording is not None:
            shadow = self._shadows.compare(task, report, retention.stored, server.scheduler)
            server.runtime.background.spawn(shadow)

    def _may_save(self, request: GenerationRequest, treatment: Treatment, report: SharingReport) -> bool:
        namespace, tokens = request.namespace.digest, request.prompt.token_ids
        control = self.server.runtime.control
        return control.may_save(treatment, namespace, tokens, num_reused=report.num_cached)

    @asynccontextmanager
    async def _constraint(self, request: GenerationRequest) -> AsyncIterator[Constraint | None]:
        """Yield the compiled grammar of the answer, if any, and close it at the end. Raises RequestError."""
        if (grammar := request.sampling.grammar) is None:
            yield None
            return
        constraint = await self.server.grammars.compiled(grammar, key=request.client)
        try:
            yield constraint
        finally:
            constraint.close()

    def _decoding(self, request: GenerationRequest) -> Decoding:
        """Return how a request's choices are decoded. Raises ContextLengthError, RequestError."""
        server, sampling = self.server, request.sampling
        for param in ("stop_token_ids", "logit_bias"):
            _check_vocabulary(param, getattr(sampling, param), server.model.vocab_size)
        return Decoding(
            tokenizer=server.encoder.backend,
            draw=resolve(sampling, server.model.sampling_defaults),
            eos_token_ids=server.eos_token_ids,
            max_tokens=_max_tokens(request, server.model.max_model_len),
        )

    async def _look_up(self, request: GenerationRequest, treatment: Treatment) -> Lookup:
        """
        Find the plan of a request.

        First wait until recent prompts of its namespace are stored, and for similar prompts in progress.
        """
        server, prompt, namespace = self.server, request.prompt, request.namespace.digest
        runtime = server.runtime
        if treatment.refusal is not None:
            return Lookup(NoPlan(treatment.refusal))
        is_short = prompt.num_tokens < runtime.sharing.shortest_that_pays
        if is_short or not runtime.sharing.may_share(prompt, request.mode):
            return await self._found(request)
        await runtime.background.caught_up(namespace, timeout_s=_SETTLE_S)
        waited = await self._arrivals.waited(
            [namespace],
            prompt.token_ids,
            request.mode,
            lambda: self._found(request),
            num_reused=lambda lookup: lookup.report(prompt.num_tokens).num_cached,
        )
        return waited.result.after_waiting(waited.seconds)

    def _found(self, request: GenerationRequest) -> Awaitable[Lookup]:
        return self.sharing.find_plan(
            request.namespace.digest, request.prompt, request.mode, max_deviation=request.max_deviation
        )

    def _submit(
        self, task: Task, emit: Callable[[Event], None], started: Started, retention: Retention
    ) -> None:
        """Give a task to the scheduler. `_released` must follow."""
        keeper = self.server.runtime.keeper
        keeper.hold(task.plan)
        try:
            emit(started)
            self.server.scheduler.submit(task)
        except BaseException:
            keeper.release(task.plan)
            retention.give_up()
            raise

    async def _released(self, task: Task, retention: Retention) -> None:
        """Wait until the scheduler releases a task. Its KV is stored in the background."""
        background = self.server.runtime.background
        try:
            await task.released.wait()
            if isinstance(task.error, RequestError):
                raise task.error
            if task.error is not None:
                raise EngineError("the engine failed while computing this request") from task.error
        finally:
            task.cancelled = True  # if it is still running, it ends after the quantum in progress
            background.spawn(retention.store(task), namespace=task.request.namespace.digest)

    def status(self) -> EngineStatus:
        if self._running is None:
            return EngineStatus(False, "starting or stopped")
        status = self._running.runtime.status()
        model = self._running.reading(is_default=self._settings.model.path is None)
        return replace(
            status,
            parts=(model, *status.parts),
            num_running=self._admission.num_running,
            num_waiting=self._admission.num_waiting,
            kv_budget_bytes=self._running.runtime.keeper.tier.max_bytes,
            shadow=self._shadows.status(),
        )

    async def explain(self, request: GenerationRequest) -> dict[str, Any]:
        lookup = await self._found(request)
        lookup.cancel()
        return await self.server.off_loop(explain_lookup, self.sharing, request.prompt, lookup, request.mode)


def _check_vocabulary(param: str, ids: Iterable[int], size: int) -> None:
    """Raises RequestError for the first token id that the model does not have."""
    if foreign := [token_id for token_id in ids if not 0 <= token_id < size]:
        raise RequestError(
            f"'{param}': token id {foreign[0]} is not in the vocabulary of {size} tokens", param=param
        )


def _max_tokens(request: GenerationRequest, max_model_len: int) -> int:
    """Return how many tokens a request may generate. Raises ContextLengthError, RequestError."""
    num_prompt_tokens = request.prompt.num_tokens
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty", param="messages")
    room = max_model_len - num_prompt_tokens
    wanted = request.sampling.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise ContextLengthError(
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=wanted if wanted is not None else 1,
            max_model_len=max_model_len,
        )
    return wanted if wanted is not None else room
