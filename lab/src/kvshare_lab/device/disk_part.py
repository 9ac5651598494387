"""
The part of `kvshare bench device` whose donors are on disk only: what is read, what is computed meanwhile.

Each near-duplicate has a donor of its own, so nothing of it is in memory. After some of them the disk becomes
half as fast, which the server does not know before it has read from it. The settings are the defaults, but
that no request is served in full to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvshare.settings import load_settings
from kvshare_lab.device.arms import servers
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.sharing_server import SharingServer
from kvshare_lab.device.start import measure_at_start
from kvshare_lab.device.traffic import alone
from kvshare_lab.vllm.prompts import near_duplicate, unrelated_prompt

_UNCONTROLLED = {"control.unshared_share": 0.0}
_EDITS, _SHORT = 5, 64
_SLOWER = 2


@dataclass(frozen=True, slots=True)
class FromDisk:
    """`rates`: GB/s. `requests`: at the disk's rate, and as many at half of it."""

    rates: Sequence[float]
    tokens: int = 30000
    changed: float = 0.01
    requests: int = 4


def from_disk(profile: Profile, options: FromDisk, *, seed: int) -> Iterator[dict[str, Any]]:
    """Of each rate: the requests in full and with their donors on disk, and the same at half of it."""
    for gb_per_s in options.rates:
        rng = np.random.default_rng(seed)
        settings, bytes_per_s = load_settings(None, _UNCONTROLLED), 1e9 * gb_per_s
        opened = servers(profile, settings, copies_blocks=False, disk_bytes_per_s=bytes_per_s)
        with opened as (plain, shared):
            measure_at_start(shared, np.random.default_rng([seed, 1]))
            assert shared.disk is not None
            for name in ("steady", "slower"):
                rows = []
                for _ in range(options.requests):
                    donor = unrelated_prompt(rng, options.tokens)
                    _leave_on_disk(shared, rng, donor)
                    near = near_duplicate(rng, donor, changed=options.changed, edits=_EDITS)
                    full, ours = alone(plain, near), alone(shared, near, donor)
                    rows.append({"full": full.to_json(plain), "shared": ours.to_json(shared)})
                yield {"gb_per_s": shared.disk.bytes_per_s / 1e9, "arm": name, "requests": rows}
                shared.disk.bytes_per_s /= _SLOWER


def _leave_on_disk(shared: SharingServer, rng: np.random.Generator, donor: Any) -> None:
    """Store a prompt, which is then on disk only. What was written is reported with a step."""
    alone(shared, donor)
    for _ in range(2):
        shared.send_straight(unrelated_prompt(rng, _SHORT), max_tokens=2, at=shared.clock.now())
        shared.run()
    shared.leave_on_disk()
