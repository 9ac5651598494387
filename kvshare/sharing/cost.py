"""What sharing costs and saves, from measured rates. Moving averages, so that a busy machine is believed."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Self

from kvshare.settings import CostSettings
from kvshare.sharing.plan import Estimate

_FEW, _MANY = 32, 256  # tokens


@dataclass(frozen=True, slots=True)
class Rates:
    """A snapshot of the measured rates: what the planner, a pure function, is given."""

    prefill_tokens_per_s: float
    load_bytes_per_s: float
    lookup_s: float = 0.0
    bytes_per_token: int = 0
    context_share: float = 0.0  # what a token that is attended to costs a pass, in computed ones
    pass_s: float = 0.0  # of a pass, however few tokens it computes
    num_extra_passes: int = 0  # that an approximate plan takes beside the one of any prefill

    def estimate(self, *, num_tokens: int, num_computed: int, num_passes: int = 0) -> Estimate:
        """
        Full prefill against computing `num_computed` tokens and loading the others, in so many passes more.

        The rate was measured where all tokens were computed, each of them seen by the same pass.
        """
        num_loaded = num_tokens - num_computed
        own = 1 / (1 + self.context_share)  # of what such a token costs
        units = num_computed + num_loaded * (1 - own)
        shared = num_loaded * self.bytes_per_token / self.load_bytes_per_s + units / self.prefill_tokens_per_s
        shared += num_passes * self.pass_s
        return Estimate(num_tokens / self.prefill_tokens_per_s, shared, self.lookup_s)

    def break_even(self, *, computed: float, min_saved_s: float) -> int | None:
        """
        From how many tokens on a plan saves so much, if it computes this share of them; None where none does.
        """
        loaded = 1 - computed
        per_token = loaded / (1 + self.context_share) / self.prefill_tokens_per_s
        per_token -= loaded * self.bytes_per_token / self.load_bytes_per_s
        fixed = min_saved_s + self.num_extra_passes * self.pass_s
        return max(0, math.ceil(fixed / per_token)) if per_token > 0 else None


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
        num_extra_passes: int = 0,
    ) -> None:
        self._prefill = prior_prefill_tokens_per_s
        self._load = prior_load_bytes_per_s
        self._lookup = 0.0
        self._pass = 0.0
        self._seen_cold_lookup = False
        self._measured: set[str] = set()
        self._smoothing = smoothing
        self._bytes_per_token = bytes_per_token
        self._context_share = context_share
        self._num_extra_passes = num_extra_passes
        self._lock = threading.Lock()

    @classmethod
    def from_settings(
        cls,
        settings: CostSettings,
        *,
        bytes_per_token: int,
        context_share: float = 0.0,
        num_extra_passes: int = 0,
    ) -> Self:
        """What config.yaml says, until something is measured. The last two: see `Rates`."""
        return cls(
            prior_prefill_tokens_per_s=settings.prior_prefill_tokens_per_s,
            prior_load_bytes_per_s=settings.prior_load_bytes_per_s,
            smoothing=settings.smoothing,
            bytes_per_token=bytes_per_token,
            context_share=context_share,
            num_extra_passes=num_extra_passes,
        )

    @property
    def rates(self) -> Rates:
        return Rates(
            self._prefill,
            self._load,
            self._lookup,
            self._bytes_per_token,
            self._context_share,
            self._pass,
            self._num_extra_passes,
        )

    @property
    def measured(self) -> frozenset[str]:
        """Which of the rates "prefill" and "load" were measured; others are what config.yaml says."""
        return frozenset(self._measured)

    def set_bytes_per_token(self, num_bytes: int) -> None:
        """For an engine that learns its KV's size after the start."""
        self._bytes_per_token = num_bytes

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """
        Long passes give the rate, short ones what a pass costs beside it; one of a few tokens says little.
        """
        if num_tokens < _FEW or seconds <= 0:
            return
        with self._lock:
            if num_tokens < _MANY:
                self._pass = max(0.0, self._blend(self._pass, seconds - num_tokens / self._prefill))
            else:
                computing = max(seconds - self._pass, seconds / 2)
                self._prefill = self._blend(self._prefill, num_tokens / computing)
                self._measured.add("prefill")

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                self._load = self._blend(self._load, num_bytes / seconds)
                self._measured.add("load")

    def observe_lookup(self, seconds: float) -> None:
        """The very first lookup finds everything cold and says nothing about the others."""
        with self._lock:
            if self._seen_cold_lookup:
                self._lookup = self._blend(self._lookup, seconds)
            self._seen_cold_lookup = True

    def _blend(self, old: float, new: float) -> float:
        return old + self._smoothing * (new - old)
