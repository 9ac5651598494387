"""The servers of a benchmark, their options, and the head of its document."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

from delta_tree import TokenIds
from kvshare import __version__
from kvshare.errors import ConfigError
from kvshare.vllm_protocol.versions import installed_build
from kvshare_lab.bench.bound import ModelSize
from kvshare_lab.bench.harness import environment
from kvshare_lab.bench.random_models import (
    DEMO_VOCAB_SIZE,
    LLAMAS,
    kv_bytes_per_token,
    llama_config,
    write_model,
)
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.kinds import SERVED, max_images, served_config, write_served_kind
from kvshare_lab.vllm.prompts import near_duplicate
from kvshare_lab.vllm.servers import START_S, Server, VllmOptions

DOCUMENT_VERSION = 1  # of the JSON of these benchmarks
_KV_BYTES = 4 * 2**30
_ROOM = 128  # tokens of context beyond the prompt
_SHARE_OF_DEVICE = 0.42  # of a GPU's memory, for each of two vLLMs
_SHARE_OF_HOST = 1 / 3  # of its memory, at most for the store of a model that is not the benchmark's own

ALWAYS_SHARE: Mapping[str, Mapping[str, Any]] = {"cost": {"min_saved_s": -60.0, "min_saved_fraction": 0.0}}
"""Settings of a proxy that shares even where that saves no time, as with small models."""

_NOT_SHOWN = ("threads", "dtype", "kv_cache_dtype", "eager", "kv_bytes", "workload", "model", "head", "out")


@dataclass(frozen=True, slots=True)
class StackOptions:
    """
    Which servers are started.

    `model`: one of LLAMAS, or a kind of kinds.yaml, of random weights; or what vLLM takes as a model.
    """

    model: str = "timing"
    vllm: VllmOptions = field(default_factory=VllmOptions)
    kv_bytes: int = _KV_BYTES
    proxy_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of its config.yaml
    seed: int = 0
    can_fail: bool = False  # loads, while `servers.failing_loads` lasts
    keeps_blocks: bool = False  # with `can_fail`: another connector does, next to KVShare's
    disk_s: float = 0.0  # that each write of the proxy's metadata takes more

    @property
    def has_random_weights(self) -> bool:
        return self.model in LLAMAS or self.model in SERVED

    @property
    def model_size(self) -> ModelSize:
        """Raises ConfigError for a model whose configuration is not on this machine."""
        config = model_config(self.model, max_model_len=self.vllm.max_model_len)
        if config is None:
            raise ConfigError("--model", f"expected a model that is on this machine, got {self.model!r}")
        return ModelSize.of_config(config)

    def to_json(self) -> dict[str, Any]:
        model = Path(self.model).name  # results are published: of a folder its name, not where it lies
        return {**asdict(self), "model": model, "vllm": {**asdict(self.vllm), "cores": self.vllm.cores}}


def model_config(name: str, *, max_model_len: int) -> PreTrainedConfig | None:
    """Of a model that vLLM is given; None where it is not on this machine."""
    if name in LLAMAS:
        return llama_config(name, max_position_embeddings=max_model_len, vocab_size=DEMO_VOCAB_SIZE)
    if name in SERVED:
        return served_config(name)
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return found


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """
    The options of every benchmark. Each benchmark has a `Config` with its own ones, and `run(config)`.

    `model`: see StackOptions; None is the benchmark's own, `own_model`.
    """

    model: str | None = None
    threads: int | None = None  # of each vLLM; None: all cores but one
    dtype: str = "bfloat16"
    kv_cache_dtype: str | None = None
    eager: bool = False
    seed: int = 0

    @property
    def own_model(self) -> str:
        return "timing"

    @property
    def chosen_model(self) -> str:
        return self.own_model if self.model is None else self.model

    @property
    def vllm(self) -> VllmOptions:
        """On a GPU, both vLLMs share it."""
        return VllmOptions(
            num_threads=self.threads,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            enforce_eager=self.eager,
            device_memory=_SHARE_OF_DEVICE if torch.cuda.is_available() else None,
        )

    def stack_of(self, vllm: VllmOptions, *, kv_bytes: int = _KV_BYTES) -> StackOptions:
        """The servers. `kv_bytes`: of the benchmark's own model; another one gets room for as many tokens."""
        ratio = self.bytes_per_token(self.chosen_model) / self.bytes_per_token(self.own_model)
        if ratio != 1:
            kv_bytes = max(kv_bytes, min(int(kv_bytes * ratio), most_store_bytes()))
        return StackOptions(self.chosen_model, vllm, kv_bytes, seed=self.seed)

    def bytes_per_token(self, model: str) -> int:
        """Of KV; for a model that is not on this machine, those of the benchmark's own."""
        config = model_config(model, max_model_len=1)
        if config is None:
            config = model_config(self.own_model, max_model_len=1)
            assert config is not None
        return kv_bytes_per_token(config, self.dtype)

    @property
    def options(self) -> StackOptions:
        """The servers that this benchmark needs."""
        return self.stack_of(self.vllm)

    def to_json(self) -> dict[str, Any]:
        """Without what the document has under `servers`, or a benchmark elsewhere."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SHOWN}


@dataclass(frozen=True, kw_only=True)
class EditedConfig(BenchConfig):
    """Of a benchmark that sends edited prompts."""

    prompt_tokens: int = 2000
    changed: float = 0.1
    edits: int = 5

    @property
    def longest(self) -> int:
        """Tokens of the longest request, of which a few may be more."""
        return self.prompt_tokens

    @property
    def options(self) -> StackOptions:
        vllm = replace(self.vllm, max_model_len=self.longest + _ROOM, kv_cache_gib=2)
        return self.stack_of(vllm)

    def edited(self, rng: np.random.Generator, donor: TokenIds, *, is_even: bool = False) -> TokenIds:
        return near_duplicate(rng, donor, changed=self.changed, edits=self.edits, is_even=is_even)


@dataclass(frozen=True, slots=True)
class Stack:
    """Stock vLLM, vLLM with the connector, and the proxy in front of that one."""

    options: StackOptions
    plain: Server
    shared: Server
    proxy: Server
    token: str  # opens the connector's control server


@contextmanager
def pair(options: StackOptions, *, start_s: float = START_S) -> Iterator[Stack]:
    """
    Both vLLMs run, the proxy does not: once it is started, it may drop what the connector has stored before.

    Raises:  EngineError if one does not start, or both are not ready after `start_s`
    """
    with tempfile.TemporaryDirectory(prefix="kvshare-bench-") as name:
        folder, model, token = Path(name), options.model, servers.new_token()
        vllm = replace(options.vllm, max_images=max_images(model))
        if model in SERVED:
            model = str(write_served_kind(model, folder / "model", seed=options.seed))
        elif options.has_random_weights:
            length, own = vllm.max_model_len, folder / "model"
            model = str(write_model(model, own, dtype=vllm.dtype, max_model_len=length, seed=options.seed))
        plain = servers.plain_vllm(model, folder, vllm)
        shared = servers.shared_vllm(
            model,
            folder,
            vllm,
            kv_bytes=options.kv_bytes,
            token=token,
            can_fail=options.can_fail,
            keeps_blocks=options.keeps_blocks,
        )
        settings, disk_s = options.proxy_settings, options.disk_s
        proxy = servers.proxy(shared, folder, token=token, settings=settings, disk_s=disk_s)
        # On one GPU they start one after the other, where each measures the memory that is free.
        is_divided = vllm.device_memory is not None and vllm.device_kv_bytes is None
        with servers.running([plain, shared], one_by_one=is_divided, start_s=start_s):
            yield Stack(options, plain, shared, proxy, token)


@contextmanager
def stack(options: StackOptions, *, start_s: float = START_S) -> Iterator[Stack]:
    """All three servers run. Raises EngineError as `pair` does."""
    with pair(options, start_s=start_s) as found, servers.running([found.proxy]):
        yield found


def document(benchmark: str, options: StackOptions, config: BenchConfig) -> dict[str, Any]:
    """The keys that every document begins with."""
    return {
        "benchmark": benchmark,
        "engine": "vllm",
        "document_version": DOCUMENT_VERSION,
        "config": config.to_json(),
        "servers": options.to_json(),
        **_model_size(options),
        "environment": {
            **environment(),
            "kvshare": __version__,
            "vllm": installed_build(),
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "num_cores": len(os.sched_getaffinity(0)),
        },
    }


def _model_size(options: StackOptions) -> dict[str, Any]:
    config = model_config(options.model, max_model_len=options.vllm.max_model_len)
    return {} if config is None else {"model": ModelSize.of_config(config).to_json()}


def most_store_bytes() -> int:
    """Of this host's memory, for a store that is as large as the model asks for."""
    return int(_SHARE_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
