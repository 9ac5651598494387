"""
Real vLLM in this process, on the CPU, with tiny random models: the scheduler can be stepped and looked into.

These tests run in a pytest of their own (`make test` starts two): vLLM binds threads and keeps global state.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from kvshare.vllm_protocol.messages import (
    FinishedReport,
    JournalEvent,
    Prefilled,
    Ticket,
    WireCopy,
    digest_of,
)
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:  # they import vLLM
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from kvshare.vllm_connector.connector import KVShareConnector
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


@contextmanager
def one_step_ahead(wanted: bool) -> Iterator[None]:
    """
    Async scheduling, which vLLM turns off on CPUs: scheduler and engine core do it here, too.

    The model runner stays synchronous. What is in flight is what has run, but not been heard of.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    check, init = CpuPlatform.check_and_update_config, GPUModelRunner.__init__

    def check_and_turn_on(cls: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = wanted

    def init_synchronous(runner: Any, config: Any, *args: Any, **options: Any) -> None:
        config.scheduler_config.async_scheduling = False
        init(runner, config, *args, **options)
        config.scheduler_config.async_scheduling = wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_turn_on))
        patch.setattr(GPUModelRunner, "__init__", init_synchronous)
        yield


class Vllm:
    """One `LLM` with the connector. Ids count up, so that salts and tickets never repeat by accident."""

    _ids = itertools.count()

    def __init__(
        self,
        model: Path,
        *,
        max_bytes: int = 1 << 28,
        control_port: int = 0,
        kv_transfer_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`kv_transfer_config`: changes to what `kvshare vllm` gives."""
        from vllm import LLM

        own = {"control_port": control_port, "max_bytes": max_bytes}

        self.model = model
        with one_step_ahead(bool(options.get("async_scheduling"))):
            self.llm = LLM(
                str(model),
                skip_tokenizer_init=True,
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
        connector: KVShareConnector = self.scheduler.connector
        assert connector._scheduler_side is not None
        return connector._scheduler_side

    @property
    def worker(self) -> ConnectorWorker:
        """The connector's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: KVShareConnector = get_kv_transfer_group()
        assert connector._worker is not None
        return connector._worker

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
        self, *requests: tuple[Sequence[int], Ticket | None, str | None], **sampling: Any
    ) -> list[Answer]:
        """Run (tokens, ticket, cache_salt) requests together until nothing is left to do, saves included."""
        from vllm import SamplingParams

        prompts, params = [], []
        for tokens, ticket, salt in requests:
            extra = None if ticket is None else {"kv_transfer_params": {"kvshare": ticket.to_json()}}
            options = {"temperature": 0, "max_tokens": 4, "logprobs": 5, "ignore_eos": True} | sampling
            params.append(SamplingParams(**options, extra_args=extra))
            prompts.append(
                {"prompt_token_ids": list(tokens)} | ({} if salt is None else {"cache_salt": salt})
            )
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.settle()
        return [
            Answer(
                list(choice.token_ids),
                [{token: entry.logprob for token, entry in step.items()} for step in choice.logprobs],
            )
            for output in outputs
            for choice in output.outputs
        ]

    def plain(self, tokens: Sequence[int], **sampling: Any) -> Answer:
        """The answer without any sharing: nobody else's blocks, no ticket."""
        return self.ask((tokens, None, self.fresh("plain")), **sampling)[0]

    def store(self, tokens: Sequence[int], **fields: Any) -> FinishedReport:
        """Make a prompt a donor. Returns its FinishedReport event."""
        ticket = self.ticket(tokens, **fields)
        self.ask((tokens, ticket, self.fresh("tenant")))
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

    def events(self) -> tuple[JournalEvent, ...]:
        return self.side.events.read(0).events

    def finished(self, ticket: Ticket) -> FinishedReport:
        """The one FinishedReport event of a ticket."""
        told = (event for event in self.events() if isinstance(event, FinishedReport))
        (event,) = (event for event in told if event.ticket_id == ticket.ticket_id)
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
        held = set(self.side.segments.ids())
        stored = set(self.worker.attached.store.ids()) - set(scheduler.drops.pending)
        assert held == stored
        assert self.side.segments.num_bytes <= self.side.segments.max_bytes

    def close(self) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here is vLLM's process's; warnings of vLLM's own code are none of ours."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if item.get_closest_marker("long") is None:
                item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("llama")` is a folder with a random model; heads are 32 wide, as vLLM's CPU kernels ask."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str, **changes: Any) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        from kvshare_lab.bench.random_models import ARCHITECTURES

        path = folder / "-".join([name, *(f"{key}={value}" for key, value in changes.items())])
        if path.exists():
            return path
        config = ARCHITECTURES[name]()
        for key, value in {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, **changes}.items():
            setattr(config, key, value)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" not in parameter_name:
                    parameter.normal_(0.0, 0.12)
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session", params=["eager", pytest.param("compiled", marks=pytest.mark.long)])
def mode(request: pytest.FixtureRequest) -> str:
    """How vLLM runs the model: everything is tested eager, and again compiled, as vLLM does by default."""
    return str(request.param)


@pytest.fixture(scope="session")
def start(checkpoint: Checkpoint, mode: str) -> Iterator[Start]:
    """`start("llama", **options)`: a vLLM; the one before it is closed unless it is the very same."""
    current: list[tuple[object, Vllm]] = []

    def begin(name: str | Path = "llama", **options: Any) -> Vllm:
        options = {"enforce_eager": mode == "eager", **options}
        wanted = (str(name), sorted(options.items()))
        if current and current[0][0] == wanted:
            return current[0][1]
        while current:
            current.pop()[1].close()
        path = name if isinstance(name, Path) else checkpoint(name)
        current.append((wanted, Vllm(path, **options)))
        return current[0][1]

    yield begin
    while current:
        current.pop()[1].close()


@pytest.fixture
def vllm(start: Start) -> Iterator[Vllm]:
    """The usual one: Llama in float32. Afterwards nothing may be left over."""
    machine = start()
    yield machine
    machine.check_idle()


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


@pytest.fixture
def text() -> Texts:
    """`text(600, seed=1)`: random token ids."""
    return random_text


@pytest.fixture
def copies() -> Copies:
    """`copies(event, (0, 100), (130, 300), shift=0)`: spans of a donor, moved; a copy a segment."""
    return copies_of


def random_text(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)]


def copies_of(event: Prefilled | FinishedReport, *spans: tuple[int, int], shift: int = 0) -> list[WireCopy]:
    return [
        WireCopy(segment.segment_id, start - segment.start, end - start, start + shift, start)
        for span in spans
        for segment in event.stored
        if (start := max(span[0], segment.start)) < (end := min(span[1], segment.start + segment.length))
    ]
