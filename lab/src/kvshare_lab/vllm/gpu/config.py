"""The options of `kvshare bench gpu`, with defaults for a GPU and smaller ones for a CPU, and its servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvshare.errors import ConfigError
from kvshare_lab.bench.bound import ModelSize
from kvshare_lab.bench.harness import chosen
from kvshare_lab.bench.random_models import LLAMAS
from kvshare_lab.vllm import load, parity, soak
from kvshare_lab.vllm.stack import ALWAYS_SHARE, EditedConfig, StackOptions, model_config, most_store_bytes

PARTS = ("self_test", "parity", "ttft", "load", "inter_token", "soak", "profile", "syncs")
"""In the order in which they are measured: what matters most comes first."""

STREAM_PROMPT = 32  # tokens: short, as their prefill is not measured
PARITY_OUTPUT, _SOAK_OUTPUT = 192, 48  # tokens; the longest of parity's
_DEVICE_ROOM = 5 * 2**30  # bytes of a vLLM on a GPU besides weights and KV: activations, graphs, staging
_ROOM = 64  # tokens of context beyond the longest prompt and its answer
_MOST_ROUNDS = 2  # of `inter_token`, as each has many gaps between tokens
_LONGEST_ARRIVAL = 16_384  # tokens of a prompt that arrives while others are answered


class _Sizes(NamedTuple):
    model: str
    kv_bytes: int
    prompt_tokens: int
    load_tokens: int
    answer_tokens: int
    concurrency: int
    requests: int
    families: int


_ON_GPU = _Sizes("random-8b", 32 * 2**30, 32_768, 8000, 32, 16, 64, 6)
_ON_CPU = _Sizes("timing", 4 * 2**30, 2000, 500, 8, 4, 12, 2)


def _sizes() -> _Sizes:
    return _ON_GPU if torch.cuda.is_available() else _ON_CPU


def _by_platform(name: str) -> Any:
    return field(default_factory=lambda: getattr(_sizes(), name))


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    """
    `prompt_tokens`: the longest prompt of `ttft`. `load_tokens`, `answer_tokens`, `concurrency`, `requests`,
    `families` (popular prompts), `shares` and `rate` are those of `load`.
    """

    seconds: float = 540.0  # of the whole run
    parts: str | None = None  # names with commas; None: all
    backends: str | None = None  # names with commas; None: the one that vLLM chooses
    out: Path | None = None  # the file that gets the document whenever a part has ended
    prompt_tokens: int = _by_platform("prompt_tokens")
    repeats: int = 3
    shares: str = "1,.5,0"  # of near-duplicates
    rate: str | None = None  # requests a second, with commas; None: shares of what stock vLLM completes
    load_tokens: int = _by_platform("load_tokens")
    answer_tokens: int = _by_platform("answer_tokens")
    concurrency: int = _by_platform("concurrency")
    requests: int = _by_platform("requests")
    families: int = _by_platform("families")
    streams: int = 8  # answers that run in `inter_token`
    output_tokens: int = 128  # of each of these
    minutes: float = 0.5  # of the soak
    kv_bytes: int | None = None  # of the store; None: as many as the platform's model needs

    @property
    def own_model(self) -> str:
        return _sizes().model

    @property
    def part_names(self) -> list[str]:
        """In their order; the self-test is always one of them. Raises ConfigError."""
        wanted = PARTS if self.parts is None else chosen(self.parts, PARTS, "--parts")
        return [name for name in PARTS if name in wanted or name == PARTS[0]]

    @property
    def backend_names(self) -> Sequence[str | None]:
        """Of attention; None is the one that vLLM chooses. Raises ConfigError."""
        if self.backends is None:
            return [None]
        names = [name.strip() for name in self.backends.split(",") if name.strip()]
        if not names:
            raise ConfigError("--backends", f"expected names with commas, got {self.backends!r}")
        return names

    @property
    def near_shares(self) -> list[float]:
        """Raises ConfigError."""
        try:
            shares = [float(each) for each in self.shares.split(",")]
        except ValueError:
            shares = [math.nan]
        if not all(0 <= share <= 1 for share in shares):
            raise ConfigError("--shares", f"expected numbers from 0 to 1 with commas, got {self.shares!r}")
        return shares

    def fitted(self) -> Config:
        """With prompts no longer than the model takes. Raises ConfigError for an option that is wrong."""
        _ = self.part_names, self.backend_names, self.near_shares, self.load.rates
        config = None if self.chosen_model in LLAMAS else model_config(self.chosen_model, max_model_len=1)
        most = getattr(config and config.get_text_config(), "max_position_embeddings", None)
        longest = (
            self.prompt_tokens if most is None else min(self.prompt_tokens, most - _ROOM - self.output_tokens)
        )
        return replace(self, prompt_tokens=longest, load_tokens=min(self.load_tokens, longest))

    def part(self, name: str) -> Config:
        """With another seed for each part, or what one stored could be an unrelated prompt of another."""
        return replace(self, seed=len(PARTS) * self.seed + PARTS.index(name))

    @property
    def inter_token(self) -> Config:
        """What `inter_token` and `syncs` measure with."""
        longest, repeats = min(self.prompt_tokens, _LONGEST_ARRIVAL), min(self.repeats, _MOST_ROUNDS)
        return replace(self.part("inter_token"), prompt_tokens=longest, repeats=repeats)

    @property
    def parity(self) -> parity.Config:
        return parity.Config(tokens=min(400, self.prompt_tokens), seed=self.part("parity").seed)

    @property
    def soak(self) -> soak.Config:
        longest = min(600, self.prompt_tokens)
        return soak.Config(
            seed=self.part("soak").seed,
            minutes=self.minutes,
            min_prompt=longest // 4,
            max_prompt=longest,
            output_tokens=_SOAK_OUTPUT,
        )

    @property
    def load(self) -> load.Config:
        return load.Config(
            seed=self.part("load").seed,
            prompt_tokens=self.load_tokens,
            changed=self.changed,
            edits=self.edits,
            concurrency=self.concurrency,
            requests=self.requests,
            families=self.families,
            min_output=self.answer_tokens,
            max_output=self.answer_tokens,
            rate=self.rate,
        )

    @property
    def cache_tokens(self) -> int | None:
        """
        Of vLLM's KV cache; None: as many as fit. On a CPU it holds what is timed, and parity is preempted.
        """
        if torch.cuda.is_available():
            return None
        streams = self.streams * (STREAM_PROMPT + self.output_tokens)
        clients = self.concurrency * (self.load_tokens + self.answer_tokens)
        return max(streams + 3 * self.prompt_tokens, clients) + self.max_model_len

    @property
    def max_model_len(self) -> int:
        longest = max(self.prompt_tokens + self.output_tokens, self.load_tokens + self.answer_tokens)
        return max(longest, self.parity.tokens + PARITY_OUTPUT, self.soak.max_model_len) + _ROOM

    @property
    def options(self) -> StackOptions:
        return self.for_backend(None)

    @property
    def _device_kv_bytes(self) -> int | None:
        """
        Of each vLLM's KV cache on a GPU, so that both can start at once; None: vLLM measures what is left.
        """
        share, config = self.vllm.device_memory, model_config(self.chosen_model, max_model_len=1)
        if share is None or config is None:
            return None
        size = ModelSize.of_config(config)
        embeddings = 2 * size.hidden_size * config.get_text_config().vocab_size
        weights = (size.layer_parameters + embeddings) * getattr(torch, self.dtype).itemsize
        left = int(share * torch.cuda.get_device_properties(0).total_memory) - weights - _DEVICE_ROOM
        return left if left > _DEVICE_ROOM else None

    def for_backend(self, backend: str | None, *, checks_syncs: bool = False) -> StackOptions:
        """The servers for one backend of attention."""
        block_size = None if self.cache_tokens is None else 32
        vllm = replace(
            self.vllm,
            max_model_len=self.max_model_len,
            num_blocks=None if block_size is None else math.ceil((self.cache_tokens or 0) / block_size),
            block_size=block_size,
            attention_backend=backend,
            checks_syncs=checks_syncs,
            device_kv_bytes=self._device_kv_bytes,
            is_resettable=True,
        )
        own = self.stack_of(vllm, kv_bytes=min(_sizes().kv_bytes, most_store_bytes()))
        kv_bytes = own.kv_bytes if self.kv_bytes is None else self.kv_bytes
        return replace(own, kv_bytes=kv_bytes, proxy_settings=ALWAYS_SHARE, can_fail=True)
