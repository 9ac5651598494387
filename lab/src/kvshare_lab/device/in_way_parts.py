"""The parts of `kvshare bench inway --engine simulated`, each with what it missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from kvshare.settings import load_settings
from kvshare_lab.device.arms import servers
from kvshare_lab.device.parts import ALWAYS_SHARE
from kvshare_lab.device.priors import Priors, learned
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.traffic import alone
from kvshare_lab.device.two_arms import InWay, in_way, of_kind
from kvshare_lab.vllm.bounds import verdict
from kvshare_lab.vllm.prompts import unrelated_prompt

_FIRST_TOKENS, _FIRST_LEAST = 4096, 0.97
_FIRST_REQUESTS = 8


def measured(
    profile: Profile, chosen: Collection[str], *, machines: Sequence[str], options: InWay, seed: int
) -> dict[str, dict[str, Any]]:
    """By part; `host_s` is what it took on this machine."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "cells": lambda: verdict(
            cell for name in machines for cell in in_way(profile, name, options, seed=seed)
        ),
        "first": lambda: _first(profile, seed),
        "priors": lambda: _priors(profile, seed),
    }
    found = {}
    for name, part in parts.items():
        if name in chosen:
            began = time.process_time()
            found[name] = {**part(), "host_s": round(time.process_time() - began, 1)}
    return found


def _first(profile: Profile, seed: int) -> dict[str, Any]:
    """Time in full over the time served, of a new server's first requests: a donor, then near-duplicates."""
    ratios = list(_ratios(profile, np.random.default_rng(seed)))
    return {
        "tokens": _FIRST_TOKENS,
        "full_over_served": [round(ratio, 3) for ratio in ratios],
        "passed": min(ratios) >= _FIRST_LEAST,
    }


def _ratios(profile: Profile, rng: np.random.Generator) -> Iterator[float]:
    donor = unrelated_prompt(rng, _FIRST_TOKENS)
    with servers(profile, load_settings(None)) as both:
        for number in range(_FIRST_REQUESTS):
            prompt = of_kind(rng, "shared", donor).prompt if number else donor
            full, served = (alone(server, prompt, donor if number else None).answer for server in both)
            yield full.ttft_s / served.ttft_s


def _priors(profile: Profile, seed: int) -> dict[str, Any]:
    rows = list(learned(profile, Priors(), ALWAYS_SHARE, seed=seed))
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}
