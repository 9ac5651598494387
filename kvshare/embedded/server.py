"""
The parts that the embedded engine opens at start and closes at stop: model, tokenizer, runtime, scheduler.

Its threads:

    kvshare-engine   two threads: load, tokenize all but short prompts, explain
    kvshare-writer   the runtime's: every change of the tree
    kvshare-compute  the scheduler's: every forward pass of a request

Its processes: one that reads the tokenizer for grammars, and one for each grammar that an answer follows
(`kvshare.grammar_pool`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from delta_tree import token_ids
from kvshare.background import Background
from kvshare.conversation.chat import Chat
from kvshare.embedded.decoder import DecoderModel, load_network
from kvshare.embedded.grammar import Grammars
from kvshare.embedded.loading import context_share, served
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.scheduler import Scheduler
from kvshare.embedded.shared_prompts import SharedPrompts
from kvshare.embedded.start_measurement import fingerprint_of, measure
from kvshare.embedded.stored_kv import StoredKV
from kvshare.embedded.tokenizer import PromptEncoder, is_short
from kvshare.errors import ModelError, UnshareableError
from kvshare.kv.sequence import SegmentKV
from kvshare.metadata import check_not_in_use
from kvshare.namespace import joined
from kvshare.part_problems import PartProblem
from kvshare.parts import PartReading, ServedPart
from kvshare.requests import Prompt
from kvshare.runtime import Runtime, open_runtime
from kvshare.served_model import FORMS_MODEL, find_model
from kvshare.settings import Settings
from kvshare.sharing.calibration import log_calibration
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.sharing.plan import NoPlan
from kvshare.sharing.rates import DISK, MEMORY
from kvshare.tenants import Tenants

_T = TypeVar("_T")
_Text = TypeVar("_Text", Chat, str, Sequence[int])
_WARM_UP_TOKENS = 16

Load = Callable[[Settings, threading.Event], tuple[DecoderModel[Any], PromptEncoder]]
"""Loads model and tokenizer in a thread; the event is set if the engine stops meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedServer:
    """The parts of a started engine."""

    executor: ThreadPoolExecutor
    model: DecoderModel[Any]
    encoder: PromptEncoder
    namespace_fields: Mapping[str, str]  # the fields that are the same in all namespaces of this model
    runtime: Runtime[MemoryKeeper[SegmentKV]]
    restoring: Background  # indexes what an earlier process has stored
    shared_prompts: SharedPrompts | None  # if there is a shared store
    grammars: Grammars
    scheduler: Scheduler

    def reading(self, *, is_default: bool) -> PartReading:
        """Report how much of this model's KV can be shared. `is_default`: the operator named no model."""
        model = self.model
        if not model.can_share:
            return PartReading(ServedPart.MODEL, PartProblem.MODEL_UNSHARED, model.unsupported_reason)
        if is_default and model.name == FORMS_MODEL.name:
            return PartReading(ServedPart.MODEL, PartProblem.MODEL_FORMS_MODEL)
        if model.unsupported_reason:
            return PartReading(ServedPart.MODEL, PartProblem.MODEL_IN_PLACE, model.unsupported_reason)
        is_cautious = self.runtime.sharing.limits.calibration.caution != 1
        return PartReading(ServedPart.MODEL, PartProblem.MODEL_CAUTIOUS if is_cautious else None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.model.eos_token_ids(self.encoder.eos_token_id)

    @property
    def shared_model(self) -> EmbeddedModel:
        """Return the model, if its KV is shared. Raises UnshareableError if it is not."""
        if not isinstance(self.model, EmbeddedModel):
            raise UnshareableError(self.model.unsupported_reason)
        return self.model

    async def encoded(self, encode: Callable[[_Text], Prompt], text: _Text) -> Prompt:
        """Tokenize, in a thread unless that takes longer than the tokenizer."""
        return encode(text) if is_short(text) else await self.off_loop(encode, text)

    async def off_loop(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a slow function that changes no state, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)


@asynccontextmanager
async def open_server(settings: Settings, load: Load, tenants: Tenants) -> AsyncIterator[EmbeddedServer]:
    """
    Open the parts in order, and close them in reverse, even if opening a later one fails.

    Raises:  ModelError, StoreError, ConfigError
    """
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as opened:
        executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvshare-engine")
        opened.callback(executor.shutdown)
        await loop.run_in_executor(executor, check_not_in_use, settings.store.path)
        stopping = threading.Event()
        opened.callback(stopping.set)
        model, encoder = await loop.run_in_executor(executor, load, settings, stopping)
        encoder.limit_to(max_model_len=model.max_model_len, vocab_size=model.vocab_size)
        fields = await loop.run_in_executor(executor, namespace_fields, model, encoder)
        limits, stored = _stored(settings, model, fields)
        runtime = await opened.enter_async_context(_runtime(settings, model, limits, stored, tenants))
        restoring, shared_prompts = Background(), stored.shared_prompts
        opened.push_async_callback(restoring.cancel)
        restoring.spawn(runtime.index_stored())
        if shared_prompts is not None:
            await opened.enter_async_context(shared_prompts.running(runtime))
        grammars = Grammars(
            encoder.backend,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids(encoder.eos_token_id),
        )
        opened.callback(grammars.close)
        scheduler = Scheduler(
            chunk_tokens=settings.engine.prefill_chunk_tokens,
            on_release=lambda task, error: loop.call_soon_threadsafe(task.end, error),
        )
        await loop.run_in_executor(executor, _warm_up, model)
        if isinstance(model, EmbeddedModel):
            await loop.run_in_executor(executor, _know_costs, settings, model, runtime, stopping.is_set)
        opened.push_async_callback(asyncio.to_thread, scheduler.stop)
        yield EmbeddedServer(
            executor, model, encoder, fields, runtime, restoring, shared_prompts, grammars, scheduler
        )


def load_model(settings: Settings, stopping: threading.Event) -> tuple[DecoderModel[Any], PromptEncoder]:
    """Load the model that config.yaml names. Raises ModelError."""
    chosen = settings.model
    source = find_model(chosen.path, download=True, cancelled=stopping)
    path = source.path
    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise ModelError(f"model.path: found no folder {path}; expected a folder or a Hugging Face name")
    if settings.engine.num_threads is not None:
        torch.set_num_threads(settings.engine.num_threads)
    encoder = PromptEncoder.load(path)
    network = load_network(path, device=chosen.device, dtype=chosen.dtype)
    name = chosen.served_name or source.name
    return served(network, name=name, max_model_len=chosen.max_model_len), encoder


def namespace_fields(model: DecoderModel[Any], encoder: PromptEncoder) -> dict[str, str]:
    """Return the fields of `Namespace` that depend on the model."""
    layout = model.layout
    return {
        "model": model.name,
        "revision": model.revision,
        "tokenizer": encoder.digest,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "kv_layout": str(layout),
        "rope": model.rope_digest,
    }


def _stored(
    settings: Settings, model: DecoderModel[Any], fields: Mapping[str, str]
) -> tuple[PlannerLimits, StoredKV]:
    """Return the limits of plans, and the store of this model. Raises ConfigError, MissingExtraError."""
    identity = joined(fields[part] for part in ("model", "revision", "tokenizer", "dtype"))

    limits = PlannerLimits.from_settings(
        settings,
        fingerprint=model.fingerprint,
        can_share=model.can_share,
        can_move_keys=model.layout.can_move,
        can_probe=model.can_listen,
    )
    if model.can_share:
        log_calibration(limits.calibration, model.fingerprint)

    parts = [*fields.values(), limits.calibration.digest]
    stored = StoredKV(
        settings.store,
        model.layout if model.can_share else None,
        min_tokens=settings.sharing.min_prompt_tokens,
        identity=identity,
        parts=parts,
        shared_tier=settings.shared_tier,
    )
    return limits, stored


def _runtime(
    settings: Settings,
    model: DecoderModel[Any],
    limits: PlannerLimits,
    stored: StoredKV,
    tenants: Tenants,
) -> AbstractAsyncContextManager[Runtime[MemoryKeeper[SegmentKV]]]:
    """Return the runtime, with the prompts whose KV is on disk."""
    return open_runtime(
        settings,
        open_tree=stored.open_tree,
        new_keeper=stored.new_keeper,
        identity=stored.identity,
        recover=stored.recover,
        limits=limits,
        cost=CostModel.from_settings(
            settings.cost,
            bytes_per_token=model.layout.bytes_per_token,
            context_share=context_share(model) if isinstance(model, EmbeddedModel) else 0.0,
            computes_ahead=stored.reads_below,
            places=(MEMORY, DISK) if stored.reads_below else (MEMORY,),
        ),
        tenants=tenants,
    )


def _warm_up(model: DecoderModel[Any]) -> None:
    """Run the first forward pass, which allocates and compiles, before requests come."""
    tokens = token_ids([0] * _WARM_UP_TOKENS)
    model.prefill(tokens, NoPlan(), model.new_sequence(_WARM_UP_TOKENS)).advance(max_queries=_WARM_UP_TOKENS)


def _know_costs(
    settings: Settings,
    model: EmbeddedModel,
    runtime: Runtime[MemoryKeeper[SegmentKV]],
    is_stopping: Callable[[], bool],
) -> None:
    """Take the costs that an earlier run has kept; if there are none, measure them now if configured."""
    runtime.kept_costs.use(fingerprint_of(model))
    if settings.cost.measure_at_start:
        chunk = settings.engine.prefill_chunk_tokens
        measure(model, runtime.sharing.cost, chunk_tokens=chunk, is_stopping=is_stopping)
