"""Machines that were not measured, derived from the profile of one that was: one thing of each is worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvshare_lab.device.profile import Profile

_BUSY = 4  # times as long as on an idle host
_OF_THE_HOST = (
    *("front_s", "front_s_per_token", "pass_s", "launch_s", "call_s", "empty_step_s"),
    *("scheduled_block_s", "source_block_s", "stored_piece_s", "blocks_launch_s", "choose_s"),
    *("find_s", "find_s_per_token", "plan_s", "plan_s_per_token", "embed_s", "store_s"),
)
_ROOM = 256  # tokens beyond the longest prompt


def _as_it_is(profile: Profile) -> Profile:
    return profile


def _slow_pcie(profile: Profile) -> Profile:
    """Eight lanes of PCIe 3."""
    return _with_costs(profile, pcie_bytes_per_s=8e9, pageable_bytes_per_s=4e9)


def _slow_store(profile: Profile) -> Profile:
    """A disk on which the proxy's database takes a tenth of a second for each prompt."""
    return _with_costs(profile, store_s=0.1)


def _full_store(profile: Profile) -> Profile:
    """Room for the KV of one long prompt, so that nearly every prompt that is stored displaces another."""
    kv_bytes = profile.model.max_model_len * profile.model.bytes_per_token * 5 // 4
    return replace(profile, model=replace(profile.model, kv_bytes=kv_bytes))


def _tiny_model(profile: Profile) -> Profile:
    """A third of the layers, of a quarter of the width, with a sixth of the KV."""
    model, costs = profile.model, profile.costs
    tiny = replace(
        model, num_layers=model.num_layers // 3, num_heads=model.num_heads // 2, head_dim=model.head_dim
    )
    faster = {
        "prefill_tokens_per_s": costs.prefill_tokens_per_s * 24,
        "pass_tokens_per_s": costs.pass_tokens_per_s * 24,
        "prefill_s_per_token2": costs.prefill_s_per_token2 / 12,
        "decode_s": costs.decode_s / 6,
        "pass_s": costs.pass_s / 3,  # launches, of which each layer has as many
    }
    return replace(_with_costs(profile, **faster), model=tiny)


def _busy_host(profile: Profile) -> Profile:
    """Other processes have three quarters of every core."""
    times = {name: getattr(profile.costs, name) * _BUSY for name in _OF_THE_HOST}
    return _with_costs(profile, **times, check_bytes_per_s=profile.costs.check_bytes_per_s / _BUSY)


def _with_costs(profile: Profile, **costs: Any) -> Profile:
    return replace(profile, costs=replace(profile.costs, **costs))


_DERIVED: dict[str, Callable[[Profile], Profile]] = {
    "as_it_is": _as_it_is,
    "slow_pcie": _slow_pcie,
    "slow_store": _slow_store,
    "full_store": _full_store,
    "tiny_model": _tiny_model,
    "busy_host": _busy_host,
}

MACHINES = tuple(_DERIVED)


def machine(profile: Profile, name: str, *, longest: int) -> Profile:
    """One of MACHINES, which takes prompts of so many tokens."""
    model = replace(profile.model, max_model_len=max(profile.model.max_model_len, longest + _ROOM))
    return _DERIVED[name](replace(profile, model=model))
