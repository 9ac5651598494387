"""The parts of `kvshare bench device`. Each part has servers of its own; both arms get the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvshare.settings import Settings, load_settings
from kvshare_lab.device.arms import servers
from kvshare_lab.device.disk_part import FromDisk, from_disk
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.servers import Server
from kvshare_lab.device.sharing_server import SharingServer
from kvshare_lab.device.traffic import (
    ARRIVALS,
    Load,
    Streams,
    between_tokens,
    closed_loop,
    first_tokens,
    moved_and_edited,
)

Opened = Callable[..., AbstractContextManager[tuple[Server, SharingServer]]]
"""Called with settings: `servers` of a profile."""

# What sharing costs is measured where it does not pay, too.
ALWAYS_SHARE = {"cost.min_saved_s": -60.0, "cost.min_saved_fraction": 0.0, "control.unshared_share": 0.0}
# Of a server that always chooses its repairs.
ALWAYS_CHOOSE = {"repair.rule": "attention", "sharing.max_deviation": 1e6}


def measured(
    profile: Profile,
    chosen: Collection[str],
    *,
    lengths: Sequence[int],
    shares: Sequence[float],
    requests: int,
    rounds: int,
    ranks: int,
    copies_blocks: bool,
    changed: float,
    disks: Sequence[float],
    seed: int,
) -> dict[str, Any]:
    """What was measured, by part."""
    settings = load_settings(None, ALWAYS_SHARE)
    opened = partial(servers, profile, ranks=ranks, copies_blocks=copies_blocks)
    load, streams = Load(requests=requests, changed=changed), Streams(rounds=rounds)
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "first_token": lambda: _first_tokens(opened, settings, lengths, seed),
        "load": lambda: _loads(opened, settings, shares, load, seed),
        "between_tokens": lambda: _between(opened, settings, streams, seed),
        "choosing": lambda: _choosing(opened, lengths, load, seed),
        "disk": lambda: from_disk(profile, FromDisk(disks), seed=seed),
    }
    return {name: list(part()) for name, part in parts.items() if name in chosen}


def _first_tokens(
    opened: Opened, settings: Settings, lengths: Sequence[int], seed: int
) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    with opened(settings) as (plain, shared):
        yield from first_tokens(plain, shared, rng, lengths)


def _loads(
    opened: Opened, settings: Settings, shares: Sequence[float], load: Load, seed: int
) -> Iterator[dict[str, Any]]:
    """Both arms get the same prompts."""
    for share in shares:
        with opened(settings) as (plain, shared):
            for arm, server in (("plain", plain), ("shared", shared)):
                began = time.process_time()
                found = closed_loop(server, np.random.default_rng(seed), load, near_share=share)
                yield {"arm": arm, **found, "host_s": _host_s(server, time.process_time() - began)}


def _between(opened: Opened, settings: Settings, streams: Streams, seed: int) -> Iterator[dict[str, Any]]:
    """Prefix hits compute as many tokens as the near-duplicates have computed."""
    for arm in ARRIVALS:
        with opened(settings) as (_, shared):
            found = between_tokens(shared, np.random.default_rng(seed), streams, arm)
        if arm == "loads":
            computed = [each["computed"] for each in found["requests"] if "computed" in each]
            streams = replace(streams, computed_tokens=round(float(np.mean(computed))))
        yield found


def _choosing(opened: Opened, lengths: Sequence[int], load: Load, seed: int) -> Iterator[dict[str, Any]]:
    """Both arms get the same prompts. A load has near-duplicates only."""
    settings = load_settings(None, {**ALWAYS_SHARE, **ALWAYS_CHOOSE})
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
