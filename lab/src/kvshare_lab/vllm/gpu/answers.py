"""
Whether answers are right: the self-test, parity, a soak.

Where values are rounded coarsely, batching alone changes an answer, so that no error can be required to be 0.
There an error is judged by that of requests that share nothing: it may be `OF_NOISE` times as large.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvshare_lab.vllm import parity as planned
from kvshare_lab.vllm import soak as mixed
from kvshare_lab.vllm.gpu.config import PARITY_OUTPUT, Config
from kvshare_lab.vllm.gpu.report import Figures, Progress
from kvshare_lab.vllm.session import Session, measured, session
from kvshare_lab.vllm.stack import Stack, document

OF_NOISE = 2.5
_MAX_EXACT_ERROR = 1e-4  # of a log-probability: as good as equal, whatever the noise
_TIE_OF_NOISE = 2.0  # tokens tie if their log-probabilities differ by less than this many times the noise
_SPARE_S = 5.0  # that a soak leaves of the time: it ends when its last answers are there


async def self_test(servers: Stack, config: Config, progress: Progress) -> Figures:
    """What the connector reports of itself, once vLLM serves; and the blocks of both KV caches."""
    async with session(servers, config) as bench:
        info = await bench.control.info()
        return {
            "passed": info.shares,
            "attention_backend": info.settings["attention_backend"],
            "refusals": list(info.refusals),
            "warnings": list(info.warnings),
            **{name: getattr(info, name) for name in ("can_move_keys", "can_choose", "bytes_per_token")},
            "settings": dict(info.settings),
            "num_blocks": {
                "plain": await bench.plain.num_blocks(),
                "shared": await bench.shared.num_blocks(),
            },
        }


async def parity(servers: Stack, config: Config, progress: Progress) -> Figures:
    """Before the proxy starts, which would drop segments that it has not planned."""

    async def measure(bench: Session[planned.Config]) -> Figures:
        if config.cache_tokens is None:
            progress.lacks("preempted", "the KV cache takes all of the memory: no request would be preempted")
            return await planned.measure(bench, preempts=False)
        batch = 5 * (bench.config.tokens + PARITY_OUTPUT)
        copies = math.ceil(config.cache_tokens / batch) + 1  # at a time: more than the cache holds
        return await planned.measure(bench, copies=copies)

    found = await measured(measure, servers, config.parity)
    return {**judged_by_noise(found), **found}


def judged_by_noise(found: Figures) -> Figures:
    """
    `passed`: the error is as small as that of batching alone; None where another prompt's KV cannot be
    distinguished from noise, so that nothing can be concluded.
    """
    error, noise, foreign = found["max_abs_logprob_error"], found["noise"], found["foreign_kv_error"]
    limit = max(_MAX_EXACT_ERROR, OF_NOISE * noise)
    return {
        "passed": error <= limit if foreign > limit else None,
        "limit": limit,
        "of_noise": error / noise if noise else None,
    }


async def soak(servers: Stack, config: Config, progress: Progress) -> Figures:
    """For as long as was asked for, or as there is time."""
    noise = progress.earlier("parity").get("noise", 0.0)
    own = replace(
        config.soak,
        minutes=min(config.soak.minutes, max(0.0, progress.left_s - _SPARE_S) / 60),
        tie_margin=max(config.soak.tie_margin, _TIE_OF_NOISE * noise),
        of_noise=None if config.dtype == "float32" else OF_NOISE,
    )
    head = document("soak", servers.options, own)
    return {"config": head["config"], **await measured(mixed.measure, servers, own)}
