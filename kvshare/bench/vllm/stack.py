"""The servers of a benchmark together: plain vLLM, vLLM with the connector, and the proxy before it."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig

from delta_tree import TokenIds
from kvshare import __version__
from kvshare.bench.bound import model_size
from kvshare.bench.harness import environment
from kvshare.bench.random_models import DEMO_VOCAB_SIZE, LLAMAS, llama_config, write_model
from kvshare.bench.vllm import servers
from kvshare.bench.vllm.client import Client, connected
from kvshare.bench.vllm.prompts import near_duplicate, stranger
from kvshare.bench.vllm.servers import Server, VllmOptions
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.versions import installed_build

DOCUMENT_VERSION = 1  # of the JSON of these benchmarks
_CONTROL_TIMEOUT_S = 60.0  # the process of a loaded vLLM may be slow to answer

ALWAYS_SHARE: Mapping[str, Mapping[str, Any]] = {
    "cost": {"min_saved_s": -60.0},
}
"""Settings of a proxy that shares where it does not pay: on a small model it must be right, not fast."""

_NOT_SHOWN = ("threads", "dtype", "eager", "kv_bytes", "workload", "model")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What every benchmark may be told. Each has a `Config` with its own, and `run(config)`."""

    threads: int | None = None  # of each vLLM; None: all cores but one
    dtype: str = "bfloat16"
    eager: bool = False
    seed: int = 0

    @property
    def vllm(self) -> VllmOptions:
        return VllmOptions(num_threads=self.threads, dtype=self.dtype, enforce_eager=self.eager)

    def to_json(self) -> dict[str, Any]:
        """Without what the document has under `servers`, or a benchmark elsewhere."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SHOWN}


@dataclass(frozen=True, kw_only=True)
class EditedConfig(BenchConfig):
    """Of a benchmark that asks for edits of prompts."""

    prompt_tokens: int = 2000
    changed: float = 0.1
    edits: int = 5

    def stranger(self, rng: np.random.Generator) -> TokenIds:
        return stranger(rng, self.prompt_tokens)

    def edited(self, rng: np.random.Generator, donor: TokenIds, *, is_even: bool = False) -> TokenIds:
        return near_duplicate(rng, donor, changed=self.changed, edits=self.edits, is_even=is_even)


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What is started. `model`: "timing", "long" or "small", of random weights, or what vLLM takes as one."""

    model: str = "timing"
    vllm: VllmOptions = field(default_factory=VllmOptions)
    kv_bytes: int = 4 * 2**30
    proxy_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of its config.yaml
    seed: int = 0

    @property
    def has_random_weights(self) -> bool:
        return self.model in LLAMAS

    @property
    def model_config(self) -> LlamaConfig:
        """Of a model of random weights."""
        return llama_config(
            self.model, max_position_embeddings=self.vllm.max_model_len, vocab_size=DEMO_VOCAB_SIZE
        )

    def to_json(self) -> dict[str, Any]:
        model = Path(self.model).name  # results are published: of a folder its name, not where it lies
        return {**asdict(self), "model": model, "vllm": {**asdict(self.vllm), "cores": self.vllm.cores}}


@dataclass(frozen=True, slots=True)
class Pair:
    """Both vLLMs, running."""

    options: StackOptions
    plain: Server
    shared: Server
    token: str  # opens the connector's control server
    folder: Path

    @asynccontextmanager
    async def control(self) -> AsyncIterator[ControlClient]:
        """Of the connector's control server."""
        assert self.shared.control_url is not None
        async with ControlClient(
            self.shared.control_url, token=self.token, timeout_s=_CONTROL_TIMEOUT_S
        ) as control:
            yield control


@dataclass(frozen=True, slots=True)
class Stack(Pair):
    """The proxy as well."""

    proxy: Server

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[Client, Client]]:
        """Of the plain vLLM and of the proxy."""
        async with connected(self.plain.url) as plain, connected(self.proxy.url) as front:
            yield plain, front


@contextmanager
def pair(options: StackOptions) -> Iterator[Pair]:
    """A temporary model and both vLLMs over it. Raises EngineError if one does not come up."""
    with tempfile.TemporaryDirectory(prefix="kvshare-bench-") as name:
        folder = Path(name)
        token = servers.new_token()
        model = _random_model(options, folder / "model") if options.has_random_weights else options.model
        plain = servers.plain_vllm(model, folder, options.vllm)
        shared = servers.shared_vllm(model, folder, options.vllm, kv_bytes=options.kv_bytes, token=token)
        # On one GPU one after the other: each measures how much memory it may take, and how much others have.
        is_divided = options.vllm.device_memory is not None
        with ExitStack() as started:
            for group in [[plain], [shared]] if is_divided else [[plain, shared]]:
                started.enter_context(servers.running(group))
            yield Pair(options, plain, shared, token, folder)


def _random_model(options: StackOptions, folder: Path) -> Path:
    vllm = options.vllm
    return write_model(
        options.model, folder, dtype=vllm.dtype, max_model_len=vllm.max_model_len, seed=options.seed
    )


@contextmanager
def stack(options: StackOptions) -> Iterator[Stack]:
    """All three servers. Raises EngineError if one does not come up."""
    with pair(options) as both, with_proxy(both) as whole:
        yield whole


@contextmanager
def with_proxy(both: Pair) -> Iterator[Stack]:
    """The proxy before running vLLMs. What the connector held by then the proxy may drop."""
    proxy = servers.proxy(both.shared, both.folder, token=both.token, settings=both.options.proxy_settings)
    with servers.running([proxy]):
        yield Stack(both.options, both.plain, both.shared, both.token, both.folder, proxy)


def document(benchmark: str, options: StackOptions, config: BenchConfig) -> dict[str, Any]:
    """What every document begins with."""
    return {
        "benchmark": benchmark,
        "engine": "vllm",
        "document_version": DOCUMENT_VERSION,
        "config": config.to_json(),
        "servers": options.to_json(),
        **({"model": model_size(options.model_config)} if options.has_random_weights else {}),
        "environment": {
            **environment(),
            "kvshare": __version__,
            "vllm": installed_build(),
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "num_cores": len(os.sched_getaffinity(0)),
        },
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
