"""
What a prefill costs, as a linear function of what it computes and loads: the input of the planner.

    seconds = steps x step_s + tokens x token_s + pairs x pair_s + passes x pass_s + reused x reused_s + loads

A pair is a computed token and a position that it attends to: a full prefill of n tokens has n^2 / 2 of them.
So a prefill has a fixed, a linear and a quadratic term.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from delta_tree import SegmentId

# Places of KV. All KV is loaded from host memory or blocks; KV on disk is read into memory first.
MEMORY = "memory"
BLOCKS = "blocks"  # of vLLM's own cache
DISK = "disk"
_LONGEST = 1 << 20  # tokens; a plan that does not pay at this length never does
# The prior of the time of a pair, in times of a token.
_TOKENS_PER_PAIR = 1 / 16384  # attention takes as long as everything else at twice 16,384 tokens


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The tokens that the prefill of one prompt computes and reuses."""

    num_tokens: int  # computed, in all passes
    num_pairs: float  # of a computed token and a position that it attends to
    num_steps: int = 1  # the engine's own forward passes; 0: only partial passes were measured
    num_passes: int = 0  # partial passes besides them
    num_reused: int = 0  # tokens whose KV is loaded
    num_in_blocks: int = 0  # those of them that lie in blocks
    num_on_disk: int = 0  # those that are read from disk before they are loaded
    num_ahead: int = 0  # leading tokens that are computed while those are read and loaded

    @classmethod
    def full(cls, num_tokens: int) -> Self:
        """Return the work of a prompt of which nothing is reused."""
        return cls(num_tokens, num_tokens**2 / 2)

    @property
    def features(self) -> tuple[float, ...]:
        """Return the features in the order of `Rates.coefficients`."""
        return (self.num_steps, self.num_tokens, self.num_pairs, self.num_passes, self.num_reused)


@dataclass(frozen=True, slots=True)
class LoadRate:
    """Seconds to load KV from one place: a fixed time, and a time per byte."""

    fixed_s: float
    byte_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.fixed_s + num_bytes * self.byte_s if num_bytes else 0.0


FREE = LoadRate(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Without(Container[SegmentId]):
    """What is in one place and not in another."""

    place: Container[SegmentId]
    other: Container[SegmentId]

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self.place and segment_id not in self.other


@dataclass(frozen=True, slots=True)
class Queue:
    """
    The work of a replica before the next request, in seconds, and which segments lie in its blocks or are on
    disk. Loads run while other prompts are computed.
    """

    loading_s: float = 0.0
    computing_s: float = 0.0
    in_blocks: Container[SegmentId] = frozenset()
    on_disk: Container[SegmentId] | None = None  # None: as the tier says
    excess_s: float = 0.0  # measured: how much longer prompts wait whose KV is loaded; see `Waits`

    def reading(self, on_disk: Container[SegmentId]) -> Queue:
        """Return the queue with these segments on disk, unless it has its own."""
        return self if self.on_disk is not None else replace(self, on_disk=on_disk)

    @property
    def to_read(self) -> Container[SegmentId]:
        """Return the segments that are read from disk before they are loaded."""
        return _Without(self.on_disk, self.in_blocks) if self.on_disk else frozenset()

    def wait_for(self, load_s: float) -> float:
        """Return how many seconds after its turn a prompt is computed, because of a load of `load_s`."""
        return max(0.0, self.loading_s + load_s - self.computing_s) + self.excess_s


IDLE = Queue()


@dataclass(frozen=True, slots=True)
class Estimate:
    """
    Estimated seconds of a prefill, from measured rates.

    The lookup is finished before a plan exists: it counts in what sharing saves, not in whether a plan pays.
    """

    full_s: float
    shared_s: float
    lookup_s: float = 0.0
    load_s: float = 0.0  # the load; it may overlap with what is computed before
    compute_s: float = 0.0  # the computation: the part of `shared_s` for which other prompts wait

    @property
    def saved_s(self) -> float:
        return self.full_s - self.shared_s


@dataclass(frozen=True, slots=True)
class MinSaved:
    """The least saving of a plan: in seconds, and as a share of the time without the plan; 0: any saving."""

    min_saved_s: float = 0.0
    min_saved_fraction: float = 0.0

    def pays(self, alternative_s: float, shared_s: float) -> bool:
        saved_s = alternative_s - shared_s
        least = self.min_saved_fraction * alternative_s if self.min_saved_fraction > 0 else self.min_saved_s
        return saved_s >= max(self.min_saved_s, least)


ANYTHING = MinSaved()  # any plan that is not slower pays


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates at one moment, in seconds for each unit of `PrefillWork`."""

    step_s: float  # fixed cost of the engine's own pass
    token_s: float
    pair_s: float
    pass_s: float  # fixed cost of a partial pass
    reused_s: float  # for a reused token, besides the load of its bytes
    loads: Mapping[str, LoadRate] = field(default_factory=lambda: MappingProxyType({}))  # by place
    lookup: LoadRate = FREE  # the search; its `byte_s` is for each token of the prompt
    planning: LoadRate = FREE  # what follows if the search finds donors; per token, too
    embedding: LoadRate = FREE  # per token, too
    bytes_per_token: int = 0
    num_extra_passes: int = 0  # partial passes of an approximate plan beyond the engine's own
    computes_ahead: bool = False  # the engine computes what comes before the first copy while a disk is read
    read_parts: int = 1  # of a load from disk, each of which is copied while the next one is read
    queue: Queue = IDLE

    @classmethod
    def linear(
        cls,
        prefill_tokens_per_s: float,
        load_bytes_per_s: float,
        *,
        bytes_per_token: int = 0,
        num_extra_passes: int = 0,
    ) -> Self:
        """Return rates with only a time per token and a time per loaded byte."""
        return cls(
            step_s=0.0,
            token_s=1 / prefill_tokens_per_s,
            pair_s=0.0,
            pass_s=0.0,
            reused_s=0.0,
            loads=MappingProxyType({MEMORY: LoadRate(0.0, 1 / load_bytes_per_s)}),
            bytes_per_token=bytes_per_token,
            num_extra_passes=num_extra_passes,
        )

    @property
    def coefficients(self) -> tuple[float, ...]:
        return (self.step_s, self.token_s, self.pair_s, self.pass_s, self.reused_s)

    def seconds(self, work: PrefillWork) -> float:
        """Estimate the time without loads."""
        return sum(map(_times, self.coefficients, work.features))

    def full_s(self, num_tokens: int) -> float:
        """Estimate the prefill of a prompt of which nothing is reused."""
        return self.seconds(PrefillWork.full(num_tokens))

    def lookup_s(self, num_tokens: int) -> float:
        """Estimate the search for donors, and planning with them."""
        return self.lookup.seconds(num_tokens) + self.planning.seconds(num_tokens)

    def ahead_s(self, num_tokens: int) -> float:
        """Return the time of so many leading tokens, in their own pass; see `PrefillWork.num_ahead`."""
        if not num_tokens:
            return 0.0
        return self.seconds(PrefillWork(num_tokens, num_tokens**2 / 2, num_steps=0, num_passes=1))

    def load_s(self, num_tokens: int, *, place: str = MEMORY) -> float:
        rate = self.loads.get(place, FREE)
        return rate.seconds(num_tokens * self.bytes_per_token)

    def disk_s(self, num_tokens: int) -> float:
        """Estimate how much later so many tokens from disk are loaded than from memory."""
        copied_s = self.loads.get(MEMORY, FREE).byte_s * num_tokens * self.bytes_per_token
        read_s = self.load_s(num_tokens, place=DISK)
        return read_s - (1 - 1 / self.read_parts) * min(copied_s, read_s)

    def least_load_s(self, num_tokens: int) -> float:
        """Estimate the time to load from the fastest place. KV on disk goes through memory."""
        places = (place for place in self.loads if place != DISK)
        return min((self.load_s(num_tokens, place=place) for place in places), default=0.0)

    def estimate(self, num_tokens: int, work: PrefillWork) -> Estimate:
        """Compare a full prefill of `num_tokens` with this work and the load of what it reuses."""
        load_s = self.load_s(work.num_reused - work.num_in_blocks)
        load_s += self.load_s(work.num_in_blocks, place=BLOCKS) + self.disk_s(work.num_on_disk)
        return self._compare(num_tokens, work, load_s, ahead_s=self.ahead_s(work.num_ahead))

    def least(self, num_tokens: int, work: PrefillWork) -> Estimate:
        """Return a lower limit of `estimate`: all that is reused comes from the fastest place."""
        return self._compare(num_tokens, work, self.least_load_s(work.num_reused))

    def _compare(
        self, num_tokens: int, work: PrefillWork, load_s: float, *, ahead_s: float = 0.0
    ) -> Estimate:
        compute_s = self.seconds(work)
        shared_s = compute_s + self.queue.wait_for(max(0.0, load_s - ahead_s))
        return Estimate(self.full_s(num_tokens), shared_s, self.lookup_s(num_tokens), load_s, compute_s)

    def unshared(self, num_tokens: int) -> Estimate:
        """Return the estimate of a prompt without a plan."""
        full_s = self.full_s(num_tokens)
        return Estimate(full_s, full_s, self.lookup.seconds(num_tokens), compute_s=full_s)

    def best_case(self, num_tokens: int, *, computed: float = 0.0, with_lookup: bool = False) -> Estimate:
        """
        Estimate a plan that computes a share `computed` of a prompt, at least one token, and loads the rest
        from the fastest place.

        With `computed` above 0 the plan is approximate; with 0 it copies a prefix.
        """
        num_computed = max(1, round(computed * num_tokens))
        work = PrefillWork(
            num_tokens=num_computed,
            num_pairs=num_computed * num_tokens / 2 if computed else num_tokens,
            num_passes=self.num_extra_passes if computed else 0,
            num_reused=num_tokens - num_computed,
        )
        found = self._compare(num_tokens, work, self.least_load_s(work.num_reused))
        return replace(found, shared_s=found.shared_s + found.lookup_s) if with_lookup else found

    def break_even(
        self, *, computed: float, threshold: MinSaved = ANYTHING, with_lookup: bool = False
    ) -> int | None:
        """
        Return the shortest prompt, in tokens, for which such a plan pays; 0: for all; None: for none.

        `computed`: see `best_case`. `with_lookup`: the plan must also save the time of the lookup.
        """

        def pays(num_tokens: int) -> bool:
            case = self.best_case(num_tokens, computed=computed, with_lookup=with_lookup)
            return threshold.pays(case.full_s, case.shared_s)

        return _first(pays)


def prior_pair_s(token_s: float) -> float:
    """Estimate the seconds of a pair from those of a token."""
    return token_s * _TOKENS_PER_PAIR


def _times(coefficient: float, feature: float) -> float:
    return coefficient * feature


def _first(holds: Callable[[int], bool]) -> int | None:
    """Return the least length for which this holds (for 1: 0), or None. It holds for all longer ones."""
    if holds(1):
        return 0
    low, high = 1, 2
    while not holds(high):
        low, high = high, 2 * high
        if high > _LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
