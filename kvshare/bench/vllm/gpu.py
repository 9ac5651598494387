"""
`kvshare bench gpu --model MODEL`: everything that only the hardware at hand can tell, in one report.

For each attention backend, over servers started with it:
    self_test    what the connector found on the running model; without it nothing is shared
    parity       planned requests against stock vLLM, beside what batching alone makes of the same requests
    break_even   from how many tokens on sharing pays
    inter_token  what running streams notice of loads and saves
    soak         mixed traffic with aborts and evictions: every exact answer must be vLLM's own
    syncs        host waits per step, of servers that are started once more with vLLM's check (CUDA only)
and once for all what copies to and from the device reach. What cannot be measured is null, and `not_measured`
says why: a backend that does not start, or a part that fails, costs the others nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvshare.bench.vllm import break_even, copies, decoding, parity, soak, syncs
from kvshare.bench.vllm.stack import (
    ALWAYS_SHARE,
    EditedConfig,
    Pair,
    Stack,
    StackOptions,
    document,
    pair,
    with_proxy,
)
from kvshare.errors import ConfigError, KVShareError

PARTS = ("self_test", "parity", "break_even", "inter_token", "soak", "syncs")
_MAX_EXACT_ERROR = 1e-4  # of a log-probability, float32
_TIE_OF_NOISE = 2.0  # tokens whose odds are as near as so many times what batching changes are no difference
_NUM_SEEDS = 4  # of the parts
_PARITY_OUTPUT, _SOAK_OUTPUT = 192, 48  # tokens; the longest of parity's
_SHARE_OF_DEVICE = 0.42  # of its memory, for each of two vLLMs


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    """`prompt_tokens` is the longest prompt. `model`: "timing", "small", or what vLLM takes as a model."""

    model: str = "timing"
    backends: str | None = None  # names with commas; None: those of the platform
    streams: int = 8
    output_tokens: int = 128
    repeats: int = 3
    minutes: float = 1.0  # of the soak

    @property
    def names(self) -> list[str]:
        """Of the attention backends."""
        if self.backends is not None:
            return [name.strip() for name in self.backends.split(",") if name.strip()]
        return platform_backends()

    # Each part has a seed of its own: with one for all, a prompt that nobody should have seen would be stored
    # by another part.

    @property
    def parity(self) -> parity.Config:
        return parity.Config(tokens=min(400, self.prompt_tokens), seed=_NUM_SEEDS * self.seed)

    @property
    def break_even(self) -> break_even.Config:
        return break_even.Config(
            prompt_tokens=self.prompt_tokens,
            changed=self.changed,
            edits=self.edits,
            repeats=self.repeats,
            seed=_NUM_SEEDS * self.seed + 1,
        )

    @property
    def decoding(self) -> decoding.Config:
        return decoding.Config(
            prompt_tokens=self.prompt_tokens,
            changed=self.changed,
            edits=self.edits,
            repeats=self.repeats,
            streams=self.streams,
            output_tokens=self.output_tokens,
            seed=_NUM_SEEDS * self.seed + 2,
        )

    @property
    def soak(self) -> soak.Config:
        longest = min(600, self.prompt_tokens)
        return soak.Config(
            seed=_NUM_SEEDS * self.seed + 3,
            minutes=self.minutes,
            min_prompt=longest // 4,
            max_prompt=longest,
            output_tokens=_SOAK_OUTPUT,
        )

    @property
    def cache_tokens(self) -> int:
        """Of vLLM's KV cache: for the streams and what arrives meanwhile, so that more of it is preempted."""
        streams = self.streams * (decoding.STREAM_PROMPT + self.output_tokens)
        return streams + 3 * self.prompt_tokens + self.max_model_len

    @property
    def max_model_len(self) -> int:
        longest = max(self.prompt_tokens, self.parity.tokens + _PARITY_OUTPUT, self.soak.max_model_len)
        return longest + 64


def platform_backends() -> list[str]:
    """What vLLM 0.32 has for models without latent attention; one that does not start here will say so."""
    if not torch.cuda.is_available():
        return ["CPU_ATTN"]
    return ["TRITON_ATTN"] if torch.version.hip else ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]


@dataclass(slots=True)
class Report:
    """Of one backend, part by part."""

    backend: str
    parts: dict[str, dict[str, Any] | None] = field(default_factory=lambda: dict.fromkeys(PARTS))
    not_measured: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False
    device_bytes: int | None = None  # in use once everything has run

    async def add(self, name: str, measured: Awaitable[dict[str, Any]]) -> None:
        """The error of a part that raises stands in the report, and the others go on."""
        try:
            self.parts[name] = await measured
        except KVShareError as exc:
            self.fail([name], str(exc))

    def fail(self, names: Sequence[str], problem: str) -> None:
        """What was said of a part before stays."""
        self.has_failed = True
        self.not_measured = dict.fromkeys(names, problem) | self.not_measured

    def to_json(self) -> dict[str, Any]:
        verdicts = [part.get("passed") for part in self.parts.values() if part is not None]
        return {
            "backend": self.backend,
            "passed": not self.has_failed and False not in verdicts,
            **self.parts,
            "device_bytes": self.device_bytes,
            "not_measured": self.not_measured,
        }


def run(config: Config) -> dict[str, Any]:
    """
    `passed`: every backend started, shares, and gave no wrong answer.

    Raises:  ConfigError where no backend is named
    """
    if not config.names:
        raise ConfigError("--backends", "expected names with commas")
    bandwidths = copies.measure()
    found = [_measured(name, config).to_json() for name in config.names]
    whole = document("gpu", stack_options(config, config.names[0]), config)
    del whole["servers"]["vllm"]["attention_backend"]
    whole["environment"]["device"] = _device()
    return {
        **whole,
        "passed": all(each["passed"] for each in found),
        "copy_bytes_per_s": bandwidths,
        "backends": found,
    }


def stack_options(config: Config, backend: str, *, checks_syncs: bool = False) -> StackOptions:
    """Of the servers for one backend. On a device two vLLMs share its memory."""
    has_device = torch.cuda.is_available()
    block_size = 16 if has_device else 32
    vllm = replace(
        config.vllm,
        max_model_len=config.max_model_len,
        num_blocks=math.ceil(config.cache_tokens / block_size),
        block_size=block_size,
        attention_backend=backend,
        device_memory=_SHARE_OF_DEVICE if has_device else None,
        checks_syncs=checks_syncs,
    )
    return StackOptions(config.model, vllm, proxy_settings=ALWAYS_SHARE, seed=config.seed)


def _measured(backend: str, config: Config) -> Report:
    report = Report(backend)
    try:
        with pair(stack_options(config, backend)) as both:
            asyncio.run(measure(both, config, report))
        if not torch.cuda.is_available():
            report.not_measured["syncs"] = "no CUDA device: the host waits for none"
        elif "syncs" not in report.not_measured:
            with pair(stack_options(config, backend, checks_syncs=True)) as both, with_proxy(both) as whole:
                asyncio.run(report.add("syncs", syncs.measure(whole, replace(config.decoding, repeats=1))))
    except KVShareError as exc:  # of what is started for several parts
        report.fail([name for name in PARTS if report.parts[name] is None], str(exc))
    return report


async def measure(both: Pair, config: Config, report: Report) -> None:
    """
    All parts but `syncs`, over vLLMs that run already. Parity comes before there is a proxy, which would drop
    what it does not know.
    """
    await report.add("self_test", self_test(both))
    tested = report.parts["self_test"]
    if tested is None or not tested["passed"]:
        report.fail(PARTS[1:], "the connector shares nothing, see self_test")
        return
    # So many at a time that they outgrow the cache.
    batch = 5 * (config.parity.tokens + _PARITY_OUTPUT)
    num_copies = math.ceil(config.cache_tokens / batch) + 1
    await report.add("parity", _parity(both, config, num_copies))
    noise = (report.parts["parity"] or {}).get("noise", 0.0)
    with with_proxy(both) as whole:
        measured: dict[str, Callable[[Stack], Awaitable[dict[str, Any]]]] = {
            "break_even": lambda servers: break_even.measure(servers, config.break_even),
            "inter_token": lambda servers: decoding.measure(servers, config.decoding),
            "soak": lambda servers: _soak(servers, config, noise),
        }
        for name, part in measured.items():
            await report.add(name, part(whole))
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        report.device_bytes = total - free


async def self_test(both: Pair) -> dict[str, Any]:
    """What the connector says of itself, once vLLM serves."""
    async with both.control() as control:
        info = await control.info()
    return {
        "passed": info.shares,
        "attention_backend": info.settings["attention_backend"],
        "refusals": list(info.refusals),
        "warnings": list(info.warnings),
        "can_move_keys": info.can_move_keys,
        "can_choose": info.can_choose,
        "bytes_per_token": info.bytes_per_token,
        "settings": dict(info.settings),
    }


async def _parity(both: Pair, config: Config, num_copies: int) -> dict[str, Any]:
    """`passed`: null where rounding is so coarse that only `of_noise` can tell."""
    mode = await parity.measure(both, config.parity, copies=num_copies)
    error, noise = mode["max_abs_logprob_error"], mode["noise"]
    is_exact = config.dtype == "float32"
    return {
        "passed": error <= _MAX_EXACT_ERROR if is_exact else None,
        "of_noise": error / noise if noise else None,
        **mode,
    }


async def _soak(servers: Stack, config: Config, noise: float) -> dict[str, Any]:
    own = config.soak
    found = await soak.measure(servers, replace(own, tie_margin=max(own.tie_margin, _TIE_OF_NOISE * noise)))
    for shared in ("benchmark", "engine", "document_version", "servers", "environment"):
        del found[shared]
    return found


def _device() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "num_bytes": properties.total_memory, "count": torch.cuda.device_count()}
