"""
How long prompts wait besides their own prefill, while other prompts are computed.

A prompt whose KV is loaded may be computed in later steps of the engine than one without a load: if its load
does not join a step, its pass follows that step and its tail is in the next one. While other prompts are
computed, each step takes as long as their prefills. So the waits of both kinds of prompts are compared. For
each kind, a line is fitted to the wait over the seconds of computing before the prompt.

Knows neither plans nor engines. Thread-safe: what was seen is only appended to.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_REMEMBERED = 64  # waits of one kind
_FEWEST = 6  # fewer waits say nothing
_VALID_S = 120.0  # older waits belong to another load of the server
_PRIOR = 2.0  # weight, in observations, of the prior: a wait as long as the queue


class _Wait(NamedTuple):
    at: float
    queue_s: float
    seconds: float


class Waits:
    """The waits of prompts that were computed in full, and of those that were shared."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = {shared: deque[_Wait](maxlen=_REMEMBERED) for shared in (True, False)}

    def observe(self, *, shared: bool, queue_s: float, seconds: float) -> None:
        """Record that a prompt waited `seconds`, when its replica had `queue_s` to compute before it."""
        self._seen[shared].append(_Wait(self._clock(), queue_s, seconds))

    def excess_s(self, queue_s: float) -> float:
        """Return how many seconds longer a shared prompt waits after `queue_s` of computing than others."""
        since = self._clock() - _VALID_S
        shared, full = ([one for one in tuple(self._seen[kind]) if one.at >= since] for kind in (True, False))
        if queue_s <= 0 or min(len(shared), len(full)) < _FEWEST:
            return 0.0
        return max(0.0, _expected_s(shared, queue_s) - _expected_s(full, queue_s))


def _expected_s(waits: list[_Wait], queue_s: float) -> float:
    """Estimate the wait after such a queue by least squares. By the prior it is as long as the queue."""
    queues = np.array([wait.queue_s for wait in waits])
    beyond = np.array([wait.seconds for wait in waits]) - queues
    features = np.stack([np.ones_like(queues), queues])
    scale = max(float(np.mean(queues)), 1e-3)
    prior = _PRIOR * np.diag([1.0, scale**2])
    fixed_s, share = np.linalg.solve(features @ features.T + prior, features @ beyond)
    return float(fixed_s + (1 + share) * queue_s)
