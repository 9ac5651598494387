"""
Whether the gate is soon right where the priors of config.yaml are wrong, for `kvshare bench inway`.

One prompt after the other, of random lengths and kinds. Each is also served without sharing, and by a server
that shares whatever it costs. After fifty requests no request is slower than in full, and none that would
save a quarter is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.settings import Settings, load_settings
from kvshare_lab.device.arms import servers
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.traffic import Arrived, alone
from kvshare_lab.device.two_arms import of_kind
from kvshare_lab.vllm.bounds import KINDS, WORST
from kvshare_lab.vllm.prompts import unrelated_prompt

LEARNED_AFTER = 50  # requests
_FACTORS = (10.0, 0.1)
_SAVES = 0.75  # of the time in full: what pays so much is not refused
_UNCONTROLLED = {"control.unshared_share": 0.0}  # what is served without sharing to compare is not refused
_REFUSED = 0.9  # of the time in full: what takes longer has saved next to nothing


@dataclass(frozen=True, slots=True)
class Priors:
    """`requests`: in all, the first fifty included."""

    lengths: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    requests: int = 110


def right_priors(profile: Profile) -> dict[str, float]:
    """What config.yaml would say if it knew this device."""
    return {
        "cost.prior_prefill_tokens_per_s": profile.costs.prefill_tokens_per_s,
        "cost.prior_load_bytes_per_s": profile.costs.pcie_bytes_per_s,
    }


def wrong_priors(profile: Profile) -> Iterator[tuple[str, dict[str, float]]]:
    """Each of them ten times as high, and as low; and those of config.yaml as they are."""
    right = right_priors(profile)
    yield "config.yaml", {}
    for name, value in right.items():
        for factor in _FACTORS:
            yield f"{name.removeprefix('cost.')} x{factor:g}", {**right, name: value * factor}


def learned(
    profile: Profile, options: Priors, always_share: Mapping[str, float], *, seed: int
) -> Iterator[dict[str, Any]]:
    """Of each wrong prior, what its requests took and which of them were served wrongly."""
    forced, _ = _played(
        profile, load_settings(None, {**right_priors(profile), **always_share}), options, seed
    )
    for name, priors in wrong_priors(profile):
        served, full = _played(profile, load_settings(None, {**priors, **_UNCONTROLLED}), options, seed)
        rows = [
            _row(*each, number=number) for number, each in enumerate(zip(full, served, forced, strict=True))
        ]
        wrong = [row for row in rows if row["number"] >= LEARNED_AFTER and row["wrong"]]
        last = max((row["number"] for row in rows if row["wrong"]), default=-1)
        yield {"prior": name, "requests": len(rows), "last_wrong": last, "wrong": wrong, "passed": not wrong}


def _row(full: Arrived, served: Arrived, forced: Arrived, *, number: int) -> dict[str, Any]:
    full_s, served_s, forced_s = (each.answer.ttft_s for each in (full, served, forced))
    is_slower = served_s > WORST.allowed_s(full_s)
    is_refused = forced_s <= _SAVES * full_s and served_s > _REFUSED * full_s
    return {
        "number": number,
        "tokens": served.num_tokens,
        "full_ms": round(1e3 * full_s, 2),
        "served_ms": round(1e3 * served_s, 2),
        "forced_ms": round(1e3 * forced_s, 2),
        "wrong": "slower" if is_slower else "refused" if is_refused else "",
    }


def _played(
    profile: Profile, settings: Settings, options: Priors, seed: int
) -> tuple[list[Arrived], list[Arrived]]:
    """All requests with sharing and in full. Donors are pinned: what is refused is not what was evicted."""
    with servers(profile, settings) as (plain, shared):
        sequence = list(_sequence(np.random.default_rng(seed), options))
        full, served = [alone(plain, *each) for each in sequence], []
        for prompt, donor in sequence:
            served.append(alone(shared, prompt, donor))
            if len(served) <= len(options.lengths):
                shared.pin(prompt)
    return served, full


def _sequence(rng: np.random.Generator, options: Priors) -> Iterator[tuple[TokenIds, TokenIds | None]]:
    """First a donor of each length, which is like no other; then prompts of all kinds."""
    donors = {length: unrelated_prompt(rng, length) for length in options.lengths}
    yield from ((donor, None) for donor in donors.values())
    for _ in range(options.requests - len(donors)):
        donor, kind = donors[int(rng.choice(options.lengths))], str(rng.choice(KINDS))
        sent = of_kind(rng, kind, donor)
        yield sent.prompt, sent.donor
