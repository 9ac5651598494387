"""
The embedded engine: admits requests, asks sharing for a plan, lets the scheduler compute, keeps the result.

Everything that blocks runs off the event loop: tokenization and commits in small executors, torch in the
scheduler's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer

from delta_tree import DeltaTree, Span
from kvshare.engines.background import Background, Embedding
from kvshare.engines.base import (
    EngineStatus,
    Event,
    Finished,
    GeneratingEngine,
    GenerationRequest,
    ModelCard,
    Started,
)
from kvshare.engines.embedded.admission import Admission
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.engines.embedded.scheduler import Scheduler
from kvshare.engines.embedded.task import Task
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.errors import (
    ContextLengthError,
    EngineError,
    ModelError,
    RequestError,
    ShuttingDownError,
)
from kvshare.index_factory import ServedIndex
from kvshare.inspection import QUESTIONS
from kvshare.kv.attention import PartialPass
from kvshare.kv.memory_tier import MemoryTier
from kvshare.metadata import check_not_in_use, open_emptied_tree
from kvshare.namespace import Namespace
from kvshare.requests import Prompt, SharingMode
from kvshare.served_model import find_model
from kvshare.settings import Settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.explain import Planning, explanation
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.planner import PlannerLimits
from vector_index import Nominator

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_WARM_UP_TOKENS = 16
_MAX_PENDING = 4  # commits waiting, per slot
_SETTLE_S = 0.25  # a prompt is stored after its answer; who asks again at once waits for that, so long


class EmbeddedEngine(GeneratingEngine):
    """One model in this process, with its tokenizer, loaded when the engine starts."""

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[threading.Event], tuple[EmbeddedModel, PromptEncoder]],
    ) -> None:
        """`load` runs in a thread; the event is set when the engine stops while it still runs."""
        self._settings = settings
        self._load = load
        self._created = int(time.time())
        self._admission = Admission(
            max_running=settings.engine.max_running, max_waiting=settings.engine.max_waiting
        )
        self._background = Background()
        self._embedding = Embedding()
        self._running = False

    @classmethod
    def from_settings(cls, settings: Settings) -> EmbeddedEngine:
        """The engine that config.yaml describes; nothing heavy happens before `start`."""
        chosen = settings.model

        def load(stopping: threading.Event) -> tuple[EmbeddedModel, PromptEncoder]:
            source = find_model(chosen.path, download=True, cancelled=stopping)
            path = source.path
            if path.startswith(("/", ".")) and not Path(path).is_dir():
                raise ModelError(f"model.path: there is no folder {path}")
            if settings.engine.num_threads is not None:
                torch.set_num_threads(settings.engine.num_threads)
            encoder = PromptEncoder.load(path)
            model = EmbeddedModel.load(
                path,
                name=chosen.served_name or source.name,
                device=chosen.device,
                dtype=chosen.dtype,
                max_model_len=chosen.max_model_len,
            )
            return model, encoder

        return cls(settings, load=load)

    @property
    def card(self) -> ModelCard:
        if not self._running:
            return ModelCard("unknown until the model is loaded", self._created, 0)
        return ModelCard(self._model.name, self._created, self._model.max_model_len)

    @property
    def tokenizer(self) -> Tokenizer:
        """The Rust tokenizer underneath."""
        return self._encoder.backend

    @property
    def encoder(self) -> PromptEncoder:
        """For benchmarks: chat template and tokenizer."""
        return self._encoder

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._model.eos_token_ids(self._encoder.eos_token_id)

    @property
    def model(self) -> EmbeddedModel:
        """For benchmarks and tests: the model this engine runs."""
        return self._model

    @property
    def sharing(self) -> Sharing:
        """For benchmarks and tests: what this engine shares with."""
        return self._sharing

    async def start(self) -> None:
        async with AsyncExitStack() as opened:
            await self._open(opened)
            self._running = True
            self._opened = opened.pop_all()

    async def stop(self) -> None:
        if self._running:
            self._running = False
            await self._opened.aclose()

    async def _open(self, opened: AsyncExitStack) -> None:
        """Open one part after the other; `opened` closes them in reverse, also where a later one fails."""
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvshare-engine")
        opened.callback(self._executor.shutdown)
        self._commits = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-commit")
        opened.callback(self._commits.shutdown)
        await self._off_loop(check_not_in_use, settings.store.path)
        stopping = threading.Event()
        opened.callback(stopping.set)
        self._model, self._encoder = await self._off_loop(self._load, stopping)
        self._encoder.limit_to(self._model.max_model_len)
        self._namespace_fields = await self._off_loop(self._describe_model)
        self._tree, forgotten = await self._off_loop(self._open_tree)
        opened.callback(self._tree.close)
        self._index = ServedIndex(settings.index, settings.store)
        nominator = await self._index.open(forgotten)
        opened.push_async_callback(self._index.close)
        self._sharing = self._new_sharing(nominator)
        opened.callback(self._sharing.close)
        self._scheduler = Scheduler(
            chunk_tokens=settings.engine.prefill_chunk_tokens, on_release=self._on_release
        )
        await self._off_loop(self._warm_up)
        opened.push_async_callback(self.settle)
        self._scheduler.start()
        opened.push_async_callback(self._off_loop, self._scheduler.stop)

    def _new_sharing(self, nominator: Nominator) -> Sharing:
        settings = self._settings
        self._keeper = MemoryKeeper(
            self._tree,
            MemoryTier(settings.store.kv_bytes),
            min_tokens=settings.sharing.min_prompt_tokens,
        )
        return Sharing(
            keeper=self._keeper,
            nominator=nominator,
            limits=PlannerLimits.from_settings(settings, can_move_keys=self._model.rotation is not None),
            cost=CostModel.from_settings(settings.cost, bytes_per_token=self._model.geometry.bytes_per_token),
            owns_index=settings.index.backend != "server",
        )

    async def settle(self) -> None:
        """For benchmarks and tests: wait until all that was computed is stored and indexed."""
        await self._background.settle()
        await self._embedding.settle()

    def namespace(self, *, tenant: str, scope: str) -> Namespace:
        return Namespace(tenant=tenant, scope=scope, **self._namespace_fields)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        return await self._off_loop(self._encoder.encode_chat, messages)

    async def encode_text(self, text: str) -> Prompt:
        return await self._off_loop(self._encoder.encode_text, text)

    async def encode_tokens(self, token_ids: Sequence[int]) -> Prompt:
        prompt = await self._off_loop(self._encoder.encode_tokens, token_ids)
        if prompt.num_tokens and int(prompt.token_ids.max()) >= self._model.vocab_size:
            raise RequestError(
                f"token id {int(prompt.token_ids.max())} is not in the vocabulary of "
                f"{self._model.vocab_size} tokens",
                param="prompt",
            )
        return prompt

    async def generate(self, request: GenerationRequest, emit: Callable[[Event], None]) -> None:
        max_tokens = self._max_tokens(request)
        async with self._admission.slot():
            self._check_running()
            # Ended requests hold their KV until it is stored: new ones wait if storing cannot keep up.
            await self._background.below(_MAX_PENDING * self._settings.engine.max_running)
            namespace = request.namespace.digest
            if self._sharing.wants(request.prompt, request.mode):
                await self._background.caught_up(namespace, timeout_s=_SETTLE_S)
            lookup = await self._sharing.find_plan(namespace, request.prompt, request.mode)
            self._sharing.note_use(lookup)
            report = lookup.report(request.prompt.num_tokens)
            task = Task(
                request,
                lookup,
                model=self._model,
                tokenizer=self.tokenizer,
                eos_token_ids=self.eos_token_ids,
                max_tokens=max_tokens,
                cost=self._sharing.cost,
                emit=lambda delta: self._call_soon(emit, delta),
            )
            del lookup  # the task lets go of the donors' KV once it is laid out
            submitted = False
            self._keeper.hold(task.plan)
            try:
                self._check_running()
                emit(Started(report))
                self._scheduler.submit(task)
                submitted = True
                await task.released.wait()
                if task.error is not None:
                    raise EngineError("the engine failed while computing this request") from task.error
                emit(Finished(report, task.num_completion_tokens, task.stage_seconds))
            finally:
                if submitted:
                    self._scheduler.cancel(task)  # a no-op where it has ended by itself
                    self._background.spawn(self._keep(task), namespace=namespace)
                else:
                    self._keeper.release(task.plan)

    def status(self) -> EngineStatus:
        if not self._running:
            return EngineStatus(False, "starting or stopped", 0, 0, 0, 0, 0, 0, 0)
        stats = self._tree.stats()
        return EngineStatus(
            ready=True,
            detail="ok",
            num_running=self._admission.num_running,
            num_waiting=self._admission.num_waiting,
            num_nodes=stats.num_nodes,
            num_segments=stats.num_segments,
            kv_bytes=self._keeper.tier.num_bytes,
            kv_budget_bytes=self._keeper.tier.max_bytes,
            max_depth=stats.max_depth,
            counters=dict(self._sharing.counters),
            index=self._index.status(),
        )

    async def explain(self, request: GenerationRequest) -> dict[str, Any]:
        lookup = await self._sharing.find_plan(request.namespace.digest, request.prompt, request.mode)
        nodes = self._sharing.own_nodes(request.namespace.digest, lookup.candidates)
        planning = Planning(
            self._tree.segment,
            self._sharing.limits,
            self._sharing.cost.rates,
            approximate=request.mode is SharingMode.APPROX,
        )
        return await self._off_loop(explanation, lookup, request.prompt.token_ids, nodes, planning)

    async def inspect(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        question = QUESTIONS.get(what)
        if question is None:
            raise RequestError(f"unknown question {what!r}; expected one of: {', '.join(sorted(QUESTIONS))}")
        answer = await self._off_loop(self._keeper.ask, question, arguments)
        await self._sharing.forget_evicted()
        document: dict[str, Any] = answer.document
        return document

    def _max_tokens(self, request: GenerationRequest) -> int:
        """How much the request may generate. Raises ContextLengthError, RequestError, ShuttingDownError."""
        self._check_running()
        num_prompt_tokens = request.prompt.num_tokens
        if num_prompt_tokens == 0:
            raise RequestError("the prompt is empty", param="messages")
        room = self._model.max_model_len - num_prompt_tokens
        wanted = request.sampling.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            raise ContextLengthError(
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=wanted if wanted is not None else 1,
                max_model_len=self._model.max_model_len,
            )
        return wanted if wanted is not None else room

    def _check_running(self) -> None:
        """Raises ShuttingDownError, also where the engine was stopped while the request waited."""
        if not self._running:
            raise ShuttingDownError("the engine is not running")

    async def _keep(self, task: Task) -> None:
        """After the worker let go of a task: store what it computed, index it, release its donors."""
        await task.released.wait()
        try:
            if task.error is not None or not (task.prefilled and task.request.store):
                return
            computed = Computed(
                task.request.namespace.digest, task.computed_tokens, task.plan, task.computed_kv
            )
            node = await self._loop.run_in_executor(self._commits, self._keeper.commit, computed)
            if node is None:  # it was known, or found no room: others may have left all the same
                await self._sharing.forget_evicted()
            else:
                await self._sharing.remember(node, None)
                self._embedding.begin(self._sharing, node, task.request.prompt.text)
        finally:
            self._keeper.release(task.plan)

    def _on_release(self, task: Task, error: BaseException | None) -> None:
        """In the worker's thread: the task will not be touched by it again."""
        self._call_soon(task.end, error)

    def _call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    async def _off_loop(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _describe_model(self) -> dict[str, str]:
        geometry = self._model.geometry
        return {
            "model": self._model.name,
            "revision": self._model.revision,
            "tokenizer": self._encoder.digest,
            "dtype": str(geometry.dtype).removeprefix("torch."),
            "kv_layout": f"{geometry.num_layers}x{geometry.num_kv_heads}x{geometry.head_dim}",
            "rope": self._model.rope_digest,
        }

    def _open_tree(self) -> tuple[DeltaTree, list[tuple[str, int]]]:
        """
        The metadata store of this very model, and the prompts that left it because their KV is gone.

        Raises:  StoreError if another process has it open
        """
        parts = ("model", "revision", "tokenizer", "dtype")
        identity = ":".join(self._namespace_fields[part] for part in parts)
        return open_emptied_tree(self._settings.store.path, identity=identity)

    def _warm_up(self) -> None:
        """The first forward pass allocates and compiles; better now than in somebody's request."""
        kv = self._model.new_sequence(_WARM_UP_TOKENS)
        tokens = np.zeros(_WARM_UP_TOKENS, dtype=np.int32)
        self._model.compute(PartialPass(kv, (Span(0, _WARM_UP_TOKENS),)), tokens)
