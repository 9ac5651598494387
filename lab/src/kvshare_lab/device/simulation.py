"""
`kvshare bench device`: what sharing costs and saves on a GPU that this machine does not have.

vLLM's own scheduler, with async scheduling and two steps in flight, and the connector's two sides run as they
are, in virtual time: a forward pass, a copy, a launch and a pass of the host over bytes take what the profile
of the device says. KV has sizes and no bytes. The document has raw times, bytes, launches and waits of every
request; `verdicts` compares it with what was measured.

    first_token     one prompt after the other, of growing length
    load            16 clients in a closed loop, and shares of near-duplicates among their prompts
    between_tokens  eight answers are decoded while long prompts arrive
    choosing        first_token and load where repairs are chosen after a first pass, or as many tokens are
                    repaired by place

It cannot know what a profile does not have: how kernels of two streams slow each other down beyond one
constant, the time of HTTP, tokenizing and the index under load, memory that runs out, and whether answers are
right. `host_s` is what Python took on this machine, and is never part of a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from kvshare.errors import ConfigError
from kvshare.settings import Settings, load_settings
from kvshare_lab.bench.harness import environment
from kvshare_lab.device.profile import read_profile
from kvshare_lab.device.servers import Server, SharingServer, servers
from kvshare_lab.device.traffic import (
    ARRIVALS,
    Load,
    Streams,
    between_tokens,
    closed_loop,
    first_tokens,
    moved_and_edited,
)

PARTS = ("first_token", "load", "between_tokens", "choosing")
Opened = Callable[..., AbstractContextManager[tuple[Server, SharingServer]]]
"""Called with settings: `servers` of a profile."""

_ALWAYS_SHARE = {"cost.min_saved_s": -60.0}  # what sharing costs is measured where it does not pay, too

# Of a server that always chooses its repairs.
_ALWAYS_CHOOSE = {"repair.rule": "attention", "sharing.max_deviation": 1e6}


def run(
    *,
    profile: str = "h100",
    parts: str = ",".join(PARTS),
    tokens: str = "1024,2048,4096,8192,16384,30000",
    near: str = "1,0.5,0",
    requests: int = 64,
    rounds: int = 3,
    ranks: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """
    `ranks`: GPUs like this one, of a model so many times as wide, whose forward passes take as long.

    Raises:  ConfigError for a profile, a part, a length or a share that is none
    """
    chosen, known = _listed("--parts", parts, str, PARTS), read_profile(profile)
    lengths = _listed("--tokens", tokens, int, range(64, known.model.max_model_len))
    shares = _listed("--near", near, float, None)
    settings, document = load_settings(None, _ALWAYS_SHARE), {}
    opened = partial(servers, known, ranks=ranks)
    if "first_token" in chosen:
        document["first_token"] = list(_first_tokens(opened, settings, lengths, seed))
    if "load" in chosen:
        document["load"] = list(_loads(opened, settings, shares, Load(requests=requests), seed))
    if "between_tokens" in chosen:
        document["between_tokens"] = list(_between(opened, settings, Streams(rounds=rounds), seed))
    if "choosing" in chosen:
        document["choosing"] = list(_choosing(opened, lengths, Load(requests=requests), seed))
    return {**document, "device": known.device, "environment": environment()}


def _first_tokens(
    opened: Opened, settings: Settings, lengths: list[int], seed: int
) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    with opened(settings) as (plain, shared):
        yield from first_tokens(plain, shared, rng, lengths)


def _loads(
    opened: Opened, settings: Settings, shares: list[float], load: Load, seed: int
) -> Iterator[dict[str, Any]]:
    """Both arms get the same prompts."""
    for share in shares:
        with opened(settings) as (plain, shared):
            for arm, server in (("plain", plain), ("shared", shared)):
                began = time.process_time()
                found = closed_loop(server, np.random.default_rng(seed), load, near_share=share)
                yield {"arm": arm, **found, "host_s": _host_s(server, time.process_time() - began)}


def _between(opened: Opened, settings: Settings, streams: Streams, seed: int) -> Iterator[dict[str, Any]]:
    for arm in ARRIVALS:
        with opened(settings) as (_, shared):
            yield between_tokens(shared, np.random.default_rng(seed), streams, arm)


def _choosing(opened: Opened, lengths: list[int], load: Load, seed: int) -> Iterator[dict[str, Any]]:
    """Both arms get the same prompts. A load has near-duplicates only."""
    settings = load_settings(None, {**_ALWAYS_SHARE, **_ALWAYS_CHOOSE})
    for arm in ("chosen", "by_place"):
        with opened(settings, chooses=arm == "chosen") as (_, shared):
            rows = list(moved_and_edited(shared, np.random.default_rng(seed), lengths))
        with opened(settings, chooses=arm == "chosen") as (_, shared):
            found = closed_loop(shared, np.random.default_rng(seed), load, near_share=1.0)
        yield {"arm": arm, "first_token": rows, "load": found}


def _host_s(server: Server, simulated: float) -> dict[str, float]:
    """
    Seconds of this machine's CPU: of scheduling, of planning, of the tables that kernels read, and of all
    with the simulation.
    """
    return {**server.host_s, "all": simulated}


def _listed(option: str, text: str, kind: Any, allowed: Any) -> list[Any]:
    try:
        found = [kind(each) for each in text.split(",") if each.strip()]
    except ValueError:
        found = []
    if not found or any(each not in allowed if allowed is not None else not 0 <= each <= 1 for each in found):
        expected = "numbers from 0 to 1" if allowed is None else f"any of {_shown(allowed)}"
        raise ConfigError(option, f"expected {expected}, with commas, got {text!r}")
    return found


def _shown(allowed: Any) -> str:
    if isinstance(allowed, range):
        return f"{allowed.start} to {allowed.stop - 1} tokens"
    return ", ".join(allowed)
