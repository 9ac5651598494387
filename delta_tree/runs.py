"""
Equal stretches of two prompts wherever they stand: the documents of a RAG prompt in another order.

Found by hashing every k-gram; a hash only nominates, the tokens are compared on every hit. The
work stays near-linear on hostile input (all tokens equal, periodic prompts, crafted collisions):
of the places a k-gram occurs at only a few are tried, and each step of the scan ends a run.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_tree.edits import Match
from delta_tree.spans import Span

Hashes = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int32]

_BASE = 0x9E3779B97F4A7C15  # odd, so that multiplying loses nothing modulo 2**64
_SIEVE_BITS = 18  # 256 KiB: beside a 2,000-token prompt 1 foreign k-gram in 4,000 passes
_FIRST_STEP = 64  # tokens compared at once before the stretch is doubled


def kgram_hashes(tokens: Ids, k: int) -> Hashes:
    """
    A 64-bit polynomial hash of each window of `k` tokens.

    Shapes:  (T,) int32 -> (max(T - k + 1, 0),) uint64
    """
    if len(tokens) < k:
        return np.empty(0, dtype=np.uint64)
    # Token ids are small and regular; without mixing, so would be the hashes' low bits.
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    # Windows of 1, 2, 4, ... tokens by doubling, joined along the binary digits of k.
    total: Hashes | None = None
    covered, width, window = 0, 1, mixed
    while True:
        if k & width:
            if total is None:
                total = window
            else:
                part = window[covered:]
                scale = np.uint64(pow(_BASE, width, 2**64))
                total = total[: len(part)] * scale + part[: len(total)]
            covered += width
        if width * 2 > k:
            break
        scale = np.uint64(pow(_BASE, width, 2**64))
        window = window[:-width] * scale + window[width:]
        width *= 2
    assert total is not None
    hashes = total[: len(tokens) - k + 1]
    hashes ^= hashes >> np.uint64(32)  # a product's low bits know nothing of the high ones
    return hashes


class Sieve:
    """A Bloom filter over hashes: says cheaply which k-grams cannot be in a collection."""

    __slots__ = ("_present",)

    def __init__(self, hashes: Hashes) -> None:
        self._present = np.zeros(1 << _SIEVE_BITS, dtype=np.bool_)
        self._present[_low_slots(hashes)] = True
        self._present[_high_slots(hashes)] = True

    def passing(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Ascending indices of the hashes that may be in the collection; no member is missing."""
        places = np.flatnonzero(self._present[_low_slots(hashes)])
        return places[self._present[_high_slots(hashes[places])]]


def _low_slots(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes & np.uint64((1 << _SIEVE_BITS) - 1)).astype(np.int64)


def _high_slots(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes >> np.uint64(64 - _SIEVE_BITS)).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """Where in a source some k-grams stand: hashes in ascending order, each with its position."""

    hashes: Hashes
    positions: npt.NDArray[np.int64]

    @classmethod
    def of(cls, hashes: Hashes, positions: npt.NDArray[np.int64]) -> "Occurrences":
        """The occurrences of `hashes[positions]`."""
        chosen = hashes[positions]
        order = np.argsort(chosen, kind="stable")  # stable: positions ascend within one hash
        return cls(chosen[order], positions[order])


def common_runs(source: Ids, target: Ids, *, min_run: int) -> list[Match]:
    """
    Equal stretches of at least `min_run` tokens, relocated ones included.

    The runs do not overlap in the target and are sorted by it; the same source tokens may serve
    several. A run ends where the tokens differ, or where its neighbour in the target begins.
    What is left of the target between the runs holds no common stretch of `min_run` tokens.
    """
    if min_run < 1:
        raise ValueError(f"min_run must be at least 1, got {min_run}")
    hashes = kgram_hashes(target, min_run)
    source_hashes = kgram_hashes(source, min_run)
    found = Occurrences.of(source_hashes, Sieve(hashes).passing(source_hashes))
    whole = Span(0, len(target))
    return list(runs_in(source, target, whole, found=found, hashes=hashes, k=min_run))


def runs_in(
    source: Ids, target: Ids, within: Span, *, found: Occurrences, hashes: Hashes, k: int
) -> Iterator[Match]:
    """
    Tile the target positions `within` with runs of the source, the longest from each place on.

    `hashes` are those of the whole target's k-grams; `found` says where the source has them.
    """
    if len(within) < k or not len(found.hashes):
        return
    wanted = hashes[within.start : within.end - k + 1]
    lows = np.searchsorted(found.hashes, wanted)
    seeds: list[int] = np.flatnonzero(
        found.hashes[np.minimum(lows, len(found.hashes) - 1)] == wanted
    ).tolist()
    last: Match | None = None
    index = 0
    while index < len(seeds):
        at = seeds[index] + within.start
        high = found.hashes.searchsorted(wanted[seeds[index]], side="right")
        places = found.positions[lows[seeds[index]] : high]
        run = _longest_run(source, target, Span(at, within.end), places)
        if run is None or run.length < k:
            index += 1
            continue
        floor = within.start if last is None else last.target
        run, end = _extended_left(run, source, target, floor=floor), run.target + run.length
        if last is not None:
            last, run = _settle(last, run, k)
            if last.length:
                yield last
        last = run
        index = bisect_left(seeds, end - within.start, lo=index + 1)
    if last is not None:
        yield last


def first_difference(a: Ids, b: Ids) -> int:
    """Length of the common prefix; looks only a little further than it."""
    limit = min(len(a), len(b))
    done, step = 0, _FIRST_STEP
    while done < limit:
        stop = min(done + step, limit)
        differs = a[done:stop] != b[done:stop]
        place = int(differs.argmax())
        if differs[place]:
            return done + place
        done, step = stop, step * 2
    return limit


def _longest_run(source: Ids, target: Ids, rest: Span, places: npt.NDArray[np.int64]) -> Match | None:
    """The longest run that starts at `rest.start`, from the nearest place among equals."""
    text = target[rest.start : rest.end]
    best: Match | None = None
    for place in _worth_trying(places, rest.start):
        length = first_difference(source[place:], text)
        if length and (best is None or length > best.length):
            best = Match(place, rest.start, length)
    return best


def _worth_trying(places: npt.NDArray[np.int64], position: int) -> Sequence[int]:
    """At most four places: the nearest, its neighbours and the first, which runs longest if all
    tokens are equal."""
    if len(places) > 4:
        nearest = int(np.searchsorted(places, position))
        near = places[max(nearest - 1, 0) : nearest + 2]
        places = np.append(near, places[0])
    ordered: list[int] = places.tolist()
    return sorted(ordered, key=lambda place: (abs(place - position), place))


def _extended_left(run: Match, source: Ids, target: Ids, *, floor: int) -> Match:
    """The run with the equal tokens before it, down to target position `floor`."""
    reach = min(run.target - floor, run.source)
    before = source[run.source - reach : run.source][::-1]
    more = first_difference(before, target[run.target - reach : run.target][::-1])
    return Match(run.source - more, run.target - more, run.length + more)


def _settle(last: Match, run: Match, k: int) -> tuple[Match, Match]:
    """
    Cut the shorter of two runs where they overlap in the target: a run should keep its head.

    No position is lost: of the earlier run nothing is left or at least `k` tokens.
    """
    overlap = last.target + last.length - run.target
    if overlap <= 0:
        return last, run
    left = last.length - overlap if run.length > last.length else last.length
    if 0 < left < k:
        left = k
    cut = left - (last.length - overlap)
    return (
        Match(last.source, last.target, left),
        Match(run.source + cut, run.target + cut, run.length - cut),
    )
