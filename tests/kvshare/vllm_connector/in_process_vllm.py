"""Real vLLM in this process, on the CPU, with tiny random models: it can be stepped and looked into."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvshare.vllm_protocol.messages import (
    FinishedReport,
    JournalEvent,
    Prefilled,
    Ticket,
    WireCopy,
    digest_of,
)
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.async_scheduling import one_step_ahead

if TYPE_CHECKING:  # they import vLLM
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from kvshare.vllm_connector.scheduler.lifecycle import SchedulerSide
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

NAMESPACE = "tenant-a"
VOCAB_SIZE = 300

_DEFAULTS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "worker_cls": "kvshare.vllm_connector.workers.KVShareWorker",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 2048,
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the log-probabilities of the likeliest at each."""

    tokens: list[int]
    logprobs: list[dict[int, float]]

    def distance(self, other: Answer) -> float:
        """Largest difference of a log-probability, over the tokens both name."""
        assert self.tokens == other.tokens
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


def own_connector(connector: Any) -> Any:
    """Ours, which may be the first one inside another."""
    return getattr(connector, "sub_connectors", [connector])[0]


class Vllm:
    """One `LLM` with the connector. Ids count up, so that salts and tickets never repeat by accident."""

    _ids = itertools.count()
    _request_ids = itertools.count(10**6)  # numbers, as `LLM.generate` sorts by them; its own count from 0

    def __init__(
        self,
        model: Path,
        *,
        max_bytes: int = 1 << 28,
        control_port: int = 0,
        disk: Path | None = None,
        shared_tier: dict[str, Any] | None = None,
        run: int = 0,
        kv_transfer_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`kv_transfer_config`: changes to what `kvshare vllm` gives. Another `run` is a start of its own."""
        from vllm import LLM

        on_disk = {"disk_path": str(disk), "disk_bytes": 1 << 30, "disk_keep_free_bytes": 0} if disk else {}
        own = {"control_port": control_port, "max_bytes": max_bytes, **on_disk, "shared_tier": shared_tier}
        self.model = model
        with one_step_ahead(bool(options.get("async_scheduling"))):
            self.llm = LLM(
                str(model),
                kv_transfer_config={
                    "kv_connector": "KVShareConnector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {"kvshare": own},
                    **(kv_transfer_config or {}),
                },
                **_DEFAULTS | options,
            )

    @property
    def core(self) -> EngineCore:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Scheduler:
        """vLLM's own."""
        return self.core.scheduler

    @property
    def side(self) -> SchedulerSide:
        """The connector's scheduler side."""
        side: SchedulerSide = own_connector(self.scheduler.connector)._scheduler_side
        return side

    @property
    def worker(self) -> ConnectorWorker:
        """The connector's worker side."""
        from vllm.distributed import kv_transfer

        worker: ConnectorWorker = own_connector(kv_transfer.get_kv_transfer_group())._worker
        return worker

    def tables(self) -> list[torch.Tensor]:
        """The model's rotary frequencies, as the connector reads them."""
        from kvshare.vllm_connector.worker.model import frequency_tables

        return frequency_tables(self.core.model_executor.driver_worker.model_runner.get_model())[0]

    def fresh(self, word: str = "r") -> str:
        return f"{word}-{next(self._ids)}"

    def ticket(self, tokens: Sequence[int], copies: Sequence[WireCopy] = (), **fields: Any) -> Ticket:
        known: dict[str, Any] = {
            "ticket_id": self.fresh(),
            "namespace": NAMESPACE,
            "prompt_digest": digest_of(list(tokens)),
            "num_tokens": len(tokens),
            "copies": tuple(copies),
        }
        return Ticket(**known | fields)

    def ask(
        self,
        *requests: tuple[Sequence[int] | dict[str, Any], Ticket | None, str | None],
        lora_request: Sequence[Any] | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Run (tokens, ticket, cache_salt) requests together until nothing is left to do, saves included."""
        from vllm import SamplingParams

        prompts, params = [], []
        for tokens, ticket, salt in requests:
            extra = None if ticket is None else {"kv_transfer_params": {"kvshare": ticket.to_json()}}
            options = {"temperature": 0, "max_tokens": 4, "logprobs": 5, "ignore_eos": True} | sampling
            params.append(SamplingParams(**options, extra_args=extra))
            prompt = dict(tokens) if isinstance(tokens, dict) else {"prompt_token_ids": list(tokens)}
            prompts.append(prompt if salt is None else prompt | {"cache_salt": salt})
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
        self.settle()
        return [
            Answer(
                list(choice.token_ids),
                [{token: entry.logprob for token, entry in step.items()} for step in choice.logprobs],
            )
            for output in outputs
            for choice in output.outputs
        ]

    def begin(
        self,
        tokens: Sequence[int],
        ticket: Ticket,
        *,
        salt: str,
        max_tokens: int = 50,
        lora_request: Any = None,
    ) -> str:
        """Add a request, which runs as the engine is stepped. Returns its id."""
        from vllm import SamplingParams

        request_id = str(next(self._request_ids))
        extra = {"kv_transfer_params": {"kvshare": ticket.to_json()}}
        options = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 5, "ignore_eos": True}
        sampling = SamplingParams(**options, extra_args=extra)
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": salt}
        self.llm.llm_engine.add_request(request_id, prompt, sampling, lora_request=lora_request)
        return request_id

    def plain(self, tokens: Sequence[int], **sampling: Any) -> Answer:
        """The answer without any sharing: nobody else's blocks, no ticket."""
        return self.ask((tokens, None, self.fresh("plain")), **sampling)[0]

    def store(self, tokens: Sequence[int], *, max_tokens: int = 4, **fields: Any) -> FinishedReport:
        """Make a prompt a donor. Returns its FinishedReport event."""
        ticket = self.ticket(tokens, **fields)
        self.ask((tokens, ticket, self.fresh("tenant")), max_tokens=max_tokens)
        return self.finished(ticket)

    def shared(
        self, tokens: Sequence[int], copies: Sequence[WireCopy], **sampling: Any
    ) -> tuple[Answer, FinishedReport]:
        """An approximate request with its private salt, and its FinishedReport event."""
        ticket = self.ticket(tokens, copies)
        answer = self.ask((tokens, ticket, private_salt(ticket.ticket_id)), **sampling)[0]
        return answer, self.finished(ticket)

    def drop(self, event: FinishedReport) -> int:
        """Drop all segments of a donor. Returns how many were held."""
        return self.side.scheduler.drop([segment.segment_id for segment in event.stored])

    def forget_blocks(self) -> None:
        """As if vLLM had given the blocks of all segments away."""
        self.side.scheduler.donors.clear()

    def events(self) -> tuple[JournalEvent, ...]:
        return self.side.events.read(0).events

    def dropped(self) -> set[int]:
        """Segments that were reported as dropped."""
        return {i for event in self.events() if event.kind == "dropped" for i in event.segment_ids}

    def prefilled(self, ticket: Ticket) -> Prefilled | None:
        """The event of a ticket whose prompt is stored while it runs, once there is one."""
        events = (event for event in self.events() if isinstance(event, Prefilled))
        return next((event for event in events if event.ticket_id == ticket.ticket_id), None)

    def finished(self, ticket: Ticket) -> FinishedReport:
        """The one FinishedReport event of a ticket."""
        reports = (event for event in self.events() if isinstance(event, FinishedReport))
        (event,) = (event for event in reports if event.ticket_id == ticket.ticket_id)
        return event

    def settle(self) -> None:
        """Step until all requests have ended and their KV is saved."""
        while self.scheduler.has_requests():
            self.core.step_fn()

    def check_idle(self) -> None:
        """Nothing is leaked: no request, no block, and every segment of the index has its bytes."""
        scheduler = self.side.scheduler
        for left_over in (scheduler._requests, scheduler._loads, scheduler.saving.requested):
            assert not left_over
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's own
        assert not scheduler.donors.has_pinned
        held = set(self.side.segments.ids()).difference(self.side.segments.only_on_disk())
        assert held == set(self.worker.attached.store.ids()) - set(scheduler.drops.pending)
        assert self.side.segments.num_bytes <= self.side.segments.max_bytes

    def close(self) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        gc.collect()


class Checkpoint(Protocol):
    def __call__(self, name: str, **changes: Any) -> Path: ...


class Start(Protocol):
    def __call__(self, name: str | Path = "llama", **options: Any) -> Vllm: ...


class Texts(Protocol):
    def __call__(self, length: int, seed: int = 0) -> list[int]: ...


class Copies(Protocol):
    def __call__(
        self, event: Prefilled | FinishedReport, *spans: tuple[int, int], shift: int = 0
    ) -> list[WireCopy]: ...


def random_text(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)]


def copies_of(event: Prefilled | FinishedReport, *spans: tuple[int, int], shift: int = 0) -> list[WireCopy]:
    return [
        WireCopy(segment.segment_id, start - segment.start, end - start, start + shift, start)
        for span in spans
        for segment in event.stored
        if (start := max(span[0], segment.start)) < (end := min(span[1], segment.start + segment.length))
    ]
