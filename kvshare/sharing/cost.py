"""Learns what prefills, loads, lookups and embeddings take, from priors and from what is measured."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Self

from kvshare.admin import Costs
from kvshare.settings import CostSettings
from kvshare.sharing.late_reads import LateReads
from kvshare.sharing.rates import (
    BLOCKS,
    DISK,
    FREE,
    MEMORY,
    LoadRate,
    MinSaved,
    PrefillWork,
    Rates,
    prior_pair_s,
)
from kvshare.sharing.regression import Regression, Row
from kvshare.sharing.waits import Waits

PREFILL: Final = "prefill"
PASS: Final = "pass"
LOAD: Final = "load"  # from host memory
LOOKUP: Final = "lookup"
PLANNING: Final = "planning"
EMBEDDING: Final = "embedding"
_LOADS: Final = {MEMORY: LOAD, BLOCKS: BLOCKS, DISK: DISK}  # by place
_PREFIX: Final = "prefix"  # a prefill after a copied prefix
_BARE_PASS: Final = "bare pass"  # without the engine's own step

_CHANGED = 0.1  # share of a prompt that is computed, in the reported break-even
_EXAMPLES = (1024, 8192)  # tokens; prompts whose full prefill is reported
_TINY = 1e-12  # seconds; replaces a prior of 0, so that its coefficient stays next to 0
_MAX_TRIES = 3  # so often a rate that was never measured is tried against its prior's advice
_TRIED_AGAIN = 128  # one in so many times that a measured rate refuses is tried: it may be out of date

# Priors that config.yaml does not name.
_STEP_S, _PASS_S, _LOAD_S = 0.005, 0.005, 0.001
_REUSED = 0.02  # the time of a reused token, as a share of that of a computed one
_LOOKUP = _PLANNING = LoadRate(0.0005, 5e-8)
ASSUMED_EMBEDDING = LoadRate(0.03, 1e-6)


class CostModel:
    """Updates the rates from measurements. Thread-safe."""

    def __init__(self, rates: Rates, *, learns: bool = True) -> None:
        """`rates`: the priors. If `learns` is False, they never change."""
        self.rates = rates  # replaced as a whole, so that readers need no lock
        self.machine = ""  # the machine on which the rates are measured, in words; set by `KeptCosts`
        self.waits = Waits()  # while other prompts are computed
        self._learns = learns
        self._work = _regression(rates.coefficients, fixed=(0, 3))  # the fixed costs of a step and of a pass
        lines = {**rates.loads, LOOKUP: rates.lookup, PLANNING: rates.planning, EMBEDDING: rates.embedding}
        self._lines = {name: _regression((line.fixed_s, line.byte_s)) for name, line in lines.items()}
        self._refused, self._tried = Counter[str](), Counter[str]()
        self._seen_cold_lookup, self._late_reads = False, LateReads()
        self._lock = threading.Lock()

    @classmethod
    def from_settings(
        cls,
        settings: CostSettings,
        *,
        bytes_per_token: int,
        context_share: float = 0.0,
        num_extra_passes: int = 0,
        computes_ahead: bool = False,
        read_parts: int = 1,
        places: Sequence[str] = (MEMORY,),
    ) -> Self:
        """
        Start with the rates of config.yaml. A place from which nothing was loaded yet is as fast as memory.

        `context_share`: the cost of a token that is reused and attended to, as a share of computing one. The
        other arguments are fields of `Rates`.
        """
        token_s = 1 / settings.prior_prefill_tokens_per_s
        load = LoadRate(_LOAD_S, 1 / settings.prior_load_bytes_per_s)
        rates = Rates(
            step_s=_STEP_S,
            token_s=token_s,
            pair_s=prior_pair_s(token_s),
            pass_s=_PASS_S,
            reused_s=token_s * max(_REUSED, context_share / (1 + context_share)),
            loads=MappingProxyType(dict.fromkeys(places, load)),
            lookup=_LOOKUP,
            planning=_PLANNING,
            embedding=ASSUMED_EMBEDDING,
            bytes_per_token=bytes_per_token,
            num_extra_passes=num_extra_passes,
            computes_ahead=computes_ahead,
            read_parts=read_parts,
        )
        return cls(rates, learns=settings.learn)

    @property
    def is_learning(self) -> bool:
        """Return whether measurements change the rates."""
        return self._learns

    @property
    def measured(self) -> frozenset[str]:
        """Return the names of the measured rates: prefill, pass, load, blocks, disk, lookup, embedding."""
        with self._lock:
            kinds = self._work.kinds().union(*(line.kinds() for line in self._lines.values()))
        known = {PASS if kind == _BARE_PASS else kind for kind in kinds}
        return frozenset({PREFILL, PASS, *_LOADS.values(), LOOKUP, EMBEDDING} & known)

    def hopeful(self) -> Rates:
        """
        Return the rates with passes that cost nothing until one is measured, and loads from unmeasured places
        that cost nothing until a load from memory is: a wrong prior would refuse the plans that correct it.
        """
        rates = self.rates
        loads = dict(rates.loads)
        if not self.knows(LOAD):
            loads |= {place: FREE for place in loads if not self.knows(_LOADS[place])}
        return replace(rates, loads=loads, pass_s=rates.pass_s if self.knows(PASS) else 0.0)

    def knows(self, rate: str) -> bool:
        """Return whether this rate was measured; always true for a model that does not learn."""
        return not self._learns or rate in self.measured

    def document(self, threshold: MinSaved) -> Costs:
        """Return the rates, which of them were measured, and from which prompt length on a plan pays."""
        rates = self.rates
        return {
            "step_s": rates.step_s,
            "token_s": rates.token_s,
            "pair_s": rates.pair_s,
            "pass_s": rates.pass_s,
            "reused_s": rates.reused_s,
            "loads": {
                name: {"fixed_s": line.fixed_s, "bytes_per_s": 1 / max(line.byte_s, _TINY)}
                for name, line in rates.loads.items()
            },
            "full_s": {str(length): rates.full_s(length) for length in _EXAMPLES},
            "lookup_s": {str(length): rates.lookup_s(length) for length in _EXAMPLES},
            "embedding_s": {str(length): rates.embedding.seconds(length) for length in _EXAMPLES},
            "bytes_per_token": rates.bytes_per_token,
            "num_extra_passes": rates.num_extra_passes,
            "machine": self.machine,
            "measured": sorted(self.measured),
            "break_even_tokens": rates.break_even(computed=_CHANGED, threshold=threshold),
        }

    def set_bytes_per_token(self, num_bytes: int) -> None:
        """Set the size of the KV, for an engine that learns it after the start."""
        with self._lock:
            self.rates = replace(self.rates, bytes_per_token=num_bytes)

    def know_disk(self) -> None:
        """Add the disk to the places of KV, as fast as memory until a read is measured."""
        with self._lock:
            if DISK not in self.rates.loads:
                load = self.rates.loads[MEMORY]
                self._lines[DISK] = _regression((load.fixed_s, load.byte_s))
                self.rates = replace(self.rates, loads=MappingProxyType({**self.rates.loads, DISK: load}))

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Observe the prefill of a prompt that was computed in full."""
        self.observe(PrefillWork.full(num_tokens), seconds)

    def observe(self, work: PrefillWork, seconds: float) -> None:
        """Observe the seconds that this work took, without its loads."""
        kind = PREFILL if not work.num_reused else PASS if work.num_passes else _PREFIX
        self._observe(self._work, kind if work.num_steps else _BARE_PASS, work.features, seconds)

    def observe_wait(self, *, shared: bool, queue_s: float, seconds: float) -> None:
        """Observe how long a prompt waited beyond its prefill. `queue_s`: seconds of computing before it."""
        if self._learns:
            self.waits.observe(shared=shared, queue_s=queue_s, seconds=seconds)

    def observe_load(
        self, num_bytes: int, seconds: float, *, place: str = MEMORY, is_late: bool = False
    ) -> None:
        if num_bytes > 0:
            if place == DISK and self._learns:
                with self._lock:
                    self._late_reads.note(self._lines[DISK], is_late=is_late)
            self._observe(self._lines[place], _LOADS[place], (1.0, num_bytes), seconds)

    def try_disk_again(self) -> None:
        """Call it before a plan: a disk that was slow is as fast as before, for one plan each 30 s."""
        with self._lock:
            if DISK in self._lines and self._late_reads.end(self._lines[DISK]):
                self._update()

    def observe_lookup(self, num_tokens: int, seconds: float, *, planning_s: float = 0.0) -> None:
        """
        Observe a search for donors, and the planning that followed if it found any, as two separate rates.

        The first lookup runs with cold caches and is not counted.
        """
        if self._seen_cold_lookup:
            self._observe(self._lines[LOOKUP], LOOKUP, (1.0, num_tokens), seconds)
            self._observe(self._lines[PLANNING], PLANNING, (1.0, num_tokens), planning_s)
        self._seen_cold_lookup = True

    def observe_embedding(self, num_tokens: int, seconds: float) -> None:
        """Observe a search by embedding."""
        self._observe(self._lines[EMBEDDING], EMBEDDING, (1.0, num_tokens), seconds)

    def tries(self, rate: str) -> bool:
        """
        Return whether to do for once what this rate advises against, so that the rate is measured.

        A rate that was never measured is tried a few times, because its prior may be wrong by any factor. A
        measured one is tried seldom, because it may have been measured in a bad moment.
        """
        if not self._learns:
            return False
        is_measured = rate in self.measured
        with self._lock:
            self._refused[rate] += 1
            due = self._refused[rate] % _TRIED_AGAIN == 0
            if not is_measured and self._tried[rate] < _MAX_TRIES:
                self._tried[rate] += 1
                due = True
        return due

    def rows(self) -> dict[str, list[Row]]:
        """Return the observations from which the rates follow, by regression, as `restore` takes them."""
        with self._lock:
            return {name: regression.rows() for name, regression in self._regressions()}

    def restore(self, rows: dict[str, list[Row]]) -> None:
        """
        Replace all observations by those of an earlier run on the same machine, with the same model.

        A model that does not learn ignores them.
        Raises:  ValueError, and changes nothing, for rows of another form
        """
        if not self._learns:
            return
        with self._lock:
            for name, regression in self._regressions():
                regression.check(rows.get(name, ()))
            for name, regression in self._regressions():
                regression.restore(rows.get(name, ()))
            self._update()

    def _regressions(self) -> Iterable[tuple[str, Regression]]:
        return {"work": self._work, **self._lines}.items()

    def _observe(
        self, regression: Regression, kind: str, features: tuple[float, ...], seconds: float
    ) -> None:
        if not self._learns or seconds <= 0:
            return
        with self._lock:
            if regression.add(kind, features, seconds):
                self._update()

    def _update(self) -> None:
        step_s, token_s, pair_s, pass_s, reused_s = self._work.coefficients
        lines = {name: LoadRate(*line.coefficients) for name, line in self._lines.items()}
        lookup, planning, embedding = (lines.pop(name) for name in (LOOKUP, PLANNING, EMBEDDING))
        if BLOCKS in lines and not self._lines[BLOCKS].kinds():
            lines[BLOCKS] = lines[MEMORY]
        self.rates = replace(
            self.rates,
            step_s=step_s,
            token_s=token_s,
            pair_s=pair_s,
            pass_s=pass_s,
            reused_s=reused_s,
            loads=MappingProxyType(lines),
            lookup=lookup,
            planning=planning,
            embedding=embedding,
        )


def rates_of(costs: Costs) -> Rates:
    """Return the rates in a server's report, without those of lookups, planning and embeddings."""
    loads = {name: LoadRate(one["fixed_s"], 1 / one["bytes_per_s"]) for name, one in costs["loads"].items()}
    return Rates(
        step_s=costs["step_s"],
        token_s=costs["token_s"],
        pair_s=costs["pair_s"],
        pass_s=costs["pass_s"],
        reused_s=costs["reused_s"],
        loads=MappingProxyType(loads),
        bytes_per_token=costs["bytes_per_token"],
        num_extra_passes=costs["num_extra_passes"],
    )


def _regression(priors: tuple[float, ...], *, fixed: tuple[int, ...] = (0,)) -> Regression:
    return Regression([max(prior, _TINY) for prior in priors], fixed=fixed)
