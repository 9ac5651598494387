"""What sharing costs and saves, from measured rates. Moving averages, so that a busy machine is believed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Self

from kvshare.settings import CostSettings
from kvshare.sharing.plan import Estimate


@dataclass(frozen=True, slots=True)
class Rates:
    """A snapshot of the measured rates: what the planner, a pure function, is given."""

    prefill_tokens_per_s: float
    load_bytes_per_s: float
    lookup_s: float = 0.0
    bytes_per_token: int = 0
    context_share: float = 0.0  # what a token that is attended to costs a pass, in computed ones

    def estimate(self, *, num_tokens: int, num_computed: int) -> Estimate:
        """
        Full prefill against computing `num_computed` tokens and loading the others.

        The rate was measured where all tokens were computed, each of them seen by the same pass.
        """
        num_loaded = num_tokens - num_computed
        own = 1 / (1 + self.context_share)  # of what such a token costs
        units = num_computed + num_loaded * (1 - own)
        shared = num_loaded * self.bytes_per_token / self.load_bytes_per_s + units / self.prefill_tokens_per_s
        return Estimate(num_tokens / self.prefill_tokens_per_s, shared, self.lookup_s)


class CostModel:
    """Keeps the rates. Thread-safe. `smoothing` is the weight of the newest measurement."""

    def __init__(
        self,
        *,
        prior_prefill_tokens_per_s: float,
        prior_load_bytes_per_s: float,
        smoothing: float,
        bytes_per_token: int,
        context_share: float = 0.0,
    ) -> None:
        self._prefill = prior_prefill_tokens_per_s
        self._load = prior_load_bytes_per_s
        self._lookup = 0.0
        self._seen_cold_lookup = False
        self._smoothing = smoothing
        self._bytes_per_token = bytes_per_token
        self._context_share = context_share
        self._lock = threading.Lock()

    @classmethod
    def from_settings(
        cls, settings: CostSettings, *, bytes_per_token: int, context_share: float = 0.0
    ) -> Self:
        """What config.yaml says, until something is measured. `context_share`: see `Rates`."""
        return cls(
            prior_prefill_tokens_per_s=settings.prior_prefill_tokens_per_s,
            prior_load_bytes_per_s=settings.prior_load_bytes_per_s,
            smoothing=settings.smoothing,
            bytes_per_token=bytes_per_token,
            context_share=context_share,
        )

    @property
    def rates(self) -> Rates:
        return Rates(self._prefill, self._load, self._lookup, self._bytes_per_token, self._context_share)

    def set_bytes_per_token(self, num_bytes: int) -> None:
        """For an engine that learns its KV's size after the start."""
        self._bytes_per_token = num_bytes

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Passes of a few tokens say little about prefill and are left out."""
        if num_tokens >= 32 and seconds > 0:
            with self._lock:
                self._prefill = self._blend(self._prefill, num_tokens / seconds)

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                self._load = self._blend(self._load, num_bytes / seconds)

    def observe_lookup(self, seconds: float) -> None:
        """The very first lookup finds everything cold and says nothing about the others."""
        with self._lock:
            if self._seen_cold_lookup:
                self._lookup = self._blend(self._lookup, seconds)
            self._seen_cold_lookup = True

    def _blend(self, old: float, new: float) -> float:
        return old + self._smoothing * (new - old)
