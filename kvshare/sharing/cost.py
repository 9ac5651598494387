"""Estimates the seconds that a plan takes and saves, from moving averages of measured rates."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import Self

from kvshare.admin import Costs
from kvshare.settings import CostSettings
from kvshare.sharing.plan import Estimate

_FEW, _MANY = 32, 256  # tokens
_CHANGED = 0.1  # share of a prompt that is computed, in the reported break-even


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured rates at one moment: the input of the planner, which is a pure function."""

    prefill_tokens_per_s: float
    load_bytes_per_s: float
    lookup_s: float = 0.0
    bytes_per_token: int = 0
    context_share: float = 0.0  # cost of attending to a token, as a share of computing one
    pass_s: float = 0.0  # fixed cost of a pass
    num_extra_passes: int = 0  # passes of an approximate plan beyond the one of any prefill

    def estimate(self, *, num_tokens: int, num_computed: int, num_passes: int = 0) -> Estimate:
        """
        Compare a full prefill with computing `num_computed` tokens and loading the others.

        `num_passes`: passes of the plan beyond the one of any prefill. The prefill rate was measured with all
        tokens computed, so it includes the cost of attending to them.
        """
        num_loaded = num_tokens - num_computed
        own = 1 / (1 + self.context_share)  # the share that computing a token has in its measured cost
        units = num_computed + num_loaded * (1 - own)
        shared = num_loaded * self.bytes_per_token / self.load_bytes_per_s + units / self.prefill_tokens_per_s
        shared += num_passes * self.pass_s
        return Estimate(num_tokens / self.prefill_tokens_per_s, shared, self.lookup_s)

    def break_even(self, *, computed: float, min_saved_s: float) -> int | None:
        """
        The shortest prompt, in tokens, for which a plan saves `min_saved_s`; None if no length does.

        `computed`: the share of the tokens that the plan computes.
        """
        loaded = 1 - computed
        per_token = loaded / (1 + self.context_share) / self.prefill_tokens_per_s
        per_token -= loaded * self.bytes_per_token / self.load_bytes_per_s
        fixed = min_saved_s + self.num_extra_passes * self.pass_s
        return max(0, math.ceil(fixed / per_token)) if per_token > 0 else None


class CostModel:
    """Updates the rates from measurements. Thread-safe. `smoothing`: the weight of the newest measurement."""

    def __init__(self, rates: Rates, *, smoothing: float) -> None:
        """`rates`: used until something is measured."""
        self.rates = rates  # replaced as a whole, so that readers need no lock
        self._smoothing = smoothing
        self._seen_cold_lookup = False
        self._measured: set[str] = set()
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
        """Start with the rates of config.yaml. The other arguments are fields of `Rates`."""
        rates = Rates(
            settings.prior_prefill_tokens_per_s,
            settings.prior_load_bytes_per_s,
            bytes_per_token=bytes_per_token,
            context_share=context_share,
            num_extra_passes=num_extra_passes,
        )
        return cls(rates, smoothing=settings.smoothing)

    @property
    def measured(self) -> frozenset[str]:
        """Which of the rates "prefill" and "load" were measured; the others are those of config.yaml."""
        return frozenset(self._measured)

    def document(self, *, min_saved_s: float) -> Costs:
        """The rates, which of them were measured, and from how many tokens on a plan pays."""
        rates = self.rates
        return {
            "prefill_tokens_per_s": rates.prefill_tokens_per_s,
            "load_bytes_per_s": rates.load_bytes_per_s,
            "lookup_s": rates.lookup_s,
            "bytes_per_token": rates.bytes_per_token,
            "context_share": rates.context_share,
            "pass_s": rates.pass_s,
            "num_extra_passes": rates.num_extra_passes,
            "measured": sorted(self.measured),
            "break_even_tokens": rates.break_even(computed=_CHANGED, min_saved_s=min_saved_s),
        }

    def set_bytes_per_token(self, num_bytes: int) -> None:
        """Called by an engine that learns the size of its KV after the start."""
        with self._lock:
            self.rates = replace(self.rates, bytes_per_token=num_bytes)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Long passes update the prefill rate, short ones the fixed cost of a pass; tiny ones are ignored."""
        if num_tokens < _FEW or seconds <= 0:
            return
        with self._lock:
            rates = self.rates
            if num_tokens < _MANY:
                fixed_s = self._blend(rates.pass_s, seconds - num_tokens / rates.prefill_tokens_per_s)
                self.rates = replace(rates, pass_s=max(0.0, fixed_s))
            else:
                computing_s = max(seconds - rates.pass_s, seconds / 2)
                rate = self._blend(rates.prefill_tokens_per_s, num_tokens / computing_s)
                self.rates = replace(rates, prefill_tokens_per_s=rate)
                self._measured.add("prefill")

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                rate = self._blend(self.rates.load_bytes_per_s, num_bytes / seconds)
                self.rates = replace(self.rates, load_bytes_per_s=rate)
                self._measured.add("load")

    def observe_lookup(self, seconds: float) -> None:
        """The first lookup runs with cold caches and is not counted."""
        with self._lock:
            if self._seen_cold_lookup:
                self.rates = replace(self.rates, lookup_s=self._blend(self.rates.lookup_s, seconds))
            self._seen_cold_lookup = True

    def _blend(self, old: float, new: float) -> float:
        return old + self._smoothing * (new - old)
