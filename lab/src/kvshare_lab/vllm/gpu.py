"""
`kvshare bench gpu --model MODEL`: what only this machine's hardware can show, in one report.

For each attention backend, over servers that are started with it:
    self_test    what the connector found on the running model; if it fails, nothing is shared
    parity       planned requests compared with stock vLLM, beside the effect of batching on the same requests
    break_even   the number of tokens from which sharing pays
    inter_token  how loads and saves delay the tokens of running streams
    soak         mixed traffic with aborts, evictions and failed loads: every exact answer must be vLLM's own
    syncs        host waits per step, of servers that are started again with vLLM's check (CUDA only)
and once for all backends the bandwidth of copies to and from the device. What cannot be measured is null, and
`not_measured` has the reason: where a backend does not start or a part fails, the others are still measured.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kvshare.errors import ConfigError, KVShareError
from kvshare_lab.bench.bound import copy_rates
from kvshare_lab.vllm import gpu_parts, parity, servers, soak
from kvshare_lab.vllm.session import Session, measured
from kvshare_lab.vllm.stack import ALWAYS_SHARE, Stack, StackOptions, document, pair, stack

PARTS = ("self_test", "parity", "break_even", "inter_token", "soak", "syncs")
_MAX_EXACT_ERROR = 1e-4  # of a log-probability, float32
_TIE_OF_NOISE = 2.0  # tokens tie if their log-probabilities differ by less than this many times the noise
_NUM_SEEDS = 4  # of the parts
_PARITY_OUTPUT, _SOAK_OUTPUT = 192, 48  # tokens; the longest of parity's
_SHARE_OF_DEVICE = 0.42  # of its memory, for each of two vLLMs


@dataclass(frozen=True, kw_only=True)
class Config(gpu_parts.Config):
    """`prompt_tokens` is the longest prompt. `model`: "timing", "small", or what vLLM takes as a model."""

    model: str = "timing"
    backends: str | None = None  # names with commas; None: those of the platform
    minutes: float = 1.0  # of the soak

    @property
    def names(self) -> list[str]:
        """Of the attention backends."""
        if self.backends is not None:
            return [name.strip() for name in self.backends.split(",") if name.strip()]
        return platform_backends()

    def part(self, number: int) -> gpu_parts.Config:
        """With another seed, or a prompt that one part stored could be an unrelated one of another."""
        return replace(self, seed=_NUM_SEEDS * self.seed + number)

    @property
    def parity(self) -> parity.Config:
        return parity.Config(tokens=min(400, self.prompt_tokens), seed=self.part(0).seed)

    @property
    def soak(self) -> soak.Config:
        longest = min(600, self.prompt_tokens)
        return soak.Config(
            seed=self.part(3).seed,
            minutes=self.minutes,
            min_prompt=longest // 4,
            max_prompt=longest,
            output_tokens=_SOAK_OUTPUT,
        )

    @property
    def cache_tokens(self) -> int:
        """Of vLLM's KV cache: for the streams and what arrives meanwhile, so that parity is preempted."""
        streams = self.streams * (gpu_parts.STREAM_PROMPT + self.output_tokens)
        return streams + 3 * self.prompt_tokens + self.max_model_len

    @property
    def max_model_len(self) -> int:
        longest = max(self.prompt_tokens, self.parity.tokens + _PARITY_OUTPUT, self.soak.max_model_len)
        return longest + 64


def platform_backends() -> list[str]:
    """Those of vLLM 0.32 for models without latent attention; the report says which do not start."""
    if not torch.cuda.is_available():
        return ["CPU_ATTN"]
    return ["TRITON_ATTN"] if torch.version.hip else ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]


@dataclass(slots=True)
class Report:
    """The figures of one backend, part by part."""

    backend: str
    parts: dict[str, dict[str, Any] | None] = field(default_factory=lambda: dict.fromkeys(PARTS))
    not_measured: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False
    device_bytes: int | None = None  # in use once everything has run

    async def add(self, name: str, measured: Awaitable[dict[str, Any]]) -> None:
        """Note what a part has measured, or its error: the other parts go on."""
        try:
            self.parts[name] = await measured
        except KVShareError as exc:
            self.fail([name], str(exc))

    def fail(self, names: Sequence[str], problem: str) -> None:
        """Note why these parts were not measured. An earlier reason stays."""
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
        raise ConfigError("--backends", f"expected names with commas, got {config.backends!r}")
    bandwidths = copy_rates()
    found = [_measured(name, config).to_json() for name in config.names]
    head = document("gpu", stack_options(config, config.names[0]), config)
    del head["servers"]["vllm"]["attention_backend"]
    head["environment"]["device"] = _device()
    return {
        **head,
        "passed": all(each["passed"] for each in found),
        "copy_bytes_per_s": bandwidths,
        "backends": found,
    }


def stack_options(config: Config, backend: str, *, checks_syncs: bool = False) -> StackOptions:
    """The servers for one backend. On a device two vLLMs share its memory."""
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
    return StackOptions(config.model, vllm, proxy_settings=ALWAYS_SHARE, seed=config.seed, can_fail=True)


def _measured(backend: str, config: Config) -> Report:
    report = Report(backend)
    try:
        with pair(stack_options(config, backend)) as both:
            asyncio.run(measure(both, config, report))
        if not torch.cuda.is_available():
            report.not_measured["syncs"] = "there is no CUDA device"
        elif "syncs" not in report.not_measured:
            with stack(stack_options(config, backend, checks_syncs=True)) as checked:
                part = replace(config.part(2), repeats=1)
                asyncio.run(report.add("syncs", measured(gpu_parts.syncs, checked, part)))
    except KVShareError as exc:  # the servers of several parts
        report.fail([name for name in PARTS if report.parts[name] is None], str(exc))
    return report


async def measure(both: Stack, config: Config, report: Report) -> None:
    """
    All parts but `syncs`, over vLLMs that run already. Parity comes before the proxy starts, which would drop
    segments that it has not planned.
    """
    await report.add("self_test", measured(self_test, both, config))
    tested = report.parts["self_test"]
    if tested is None or not tested["passed"]:
        report.fail(PARTS[1:], "the connector shares nothing, see self_test")
        return
    await report.add("parity", measured(partial(_parity, report=config), both, config.parity))
    noise = (report.parts["parity"] or {}).get("noise", 0.0)
    soaked = replace(config.soak, tie_margin=max(config.soak.tie_margin, _TIE_OF_NOISE * noise))
    with servers.running([both.proxy]):
        await report.add("break_even", measured(gpu_parts.break_even, both, config.part(1)))
        await report.add("inter_token", measured(gpu_parts.inter_token, both, config.part(2)))
        await report.add("soak", measured(_soak, both, soaked))
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        report.device_bytes = total - free


async def self_test(bench: Session[Config]) -> dict[str, Any]:
    """What the connector reports of itself, once vLLM serves."""
    info = await bench.control.info()
    return {
        "passed": info.shares,
        "attention_backend": info.settings["attention_backend"],
        "refusals": list(info.refusals),
        "warnings": list(info.warnings),
        **{name: getattr(info, name) for name in ("can_move_keys", "can_choose", "bytes_per_token")},
        "settings": dict(info.settings),
    }


async def _parity(bench: Session[parity.Config], *, report: Config) -> dict[str, Any]:
    """`passed`: null where rounding is so coarse that only `of_noise` says anything."""
    batch = 5 * (bench.config.tokens + _PARITY_OUTPUT)
    num_copies = math.ceil(report.cache_tokens / batch) + 1  # at a time: more than the cache holds
    mode = await parity.measure(bench, copies=num_copies)
    error, noise = mode["max_abs_logprob_error"], mode["noise"]
    return {
        "passed": error <= _MAX_EXACT_ERROR if report.dtype == "float32" else None,
        "of_noise": error / noise if noise else None,
        **mode,
    }


async def _soak(bench: Session[soak.Config]) -> dict[str, Any]:
    """With those keys of a soak's document that the report does not have."""
    head = document("soak", bench.servers.options, bench.config)
    own: dict[str, Any] = {name: head[name] for name in ("config", "model") if name in head}
    return {**own, **await soak.measure(bench)}


def _device() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "num_bytes": properties.total_memory, "count": torch.cuda.device_count()}
