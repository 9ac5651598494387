"""
Equal stretches (runs) of two prompts at any positions, such as documents of a RAG prompt in another order.

They are found by hashes of all k-grams; on each hit the tokens are compared. Time stays near-linear on
hostile input (all tokens equal, periodic prompts, crafted collisions): of the positions where a k-gram occurs
only a few are tried, and the scan goes on after each run that it finds.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_tree.edits import Match
from delta_tree.kgrams import Hashes, Ids, Places
from delta_tree.spans import Span

_TRIED = 2  # k-grams that are looked for one by one, before the target's are sorted
_ASKED_AT_ONCE = 256  # k-grams looked up at once; most donors share one of the first 256
_FIRST_STEP = 64  # tokens in the first comparison; each further one takes twice as many


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two prompts, and the hashes of all their k-grams."""

    source: Ids
    target: Ids
    source_hashes: Hashes
    target_hashes: Hashes
    k: int

    def has_common_run(self, places: Places, known: Callable[[], Hashes], *, start: int = 0) -> bool:
        """
        Return whether the target has, from `start` on, a k-gram of the source at `places`; `known`: its
        sorted hashes.
        """
        if any(self._stands_in(place, start) for place in places[:_TRIED].tolist()):
            return True  # usually the first one is, and nothing must be sorted
        for number in range(0, len(places), _ASKED_AT_ONCE):
            some = places[number : number + _ASKED_AT_ONCE]
            asked = self.source_hashes[some]
            at = np.minimum(known().searchsorted(asked), len(known()) - 1)
            if any(self._stands_in(place, start) for place in some[known()[at] == asked].tolist()):
                return True
        return False

    def _stands_in(self, place: int, start: int) -> bool:
        """Return whether the target has the source's k-gram at `place`, token for token."""
        kgram = self.source[place : place + self.k]
        places = np.flatnonzero(self.target_hashes[start:] == self.source_hashes[place])[:4] + start
        return any(np.array_equal(kgram, self.target[at : at + self.k]) for at in places.tolist())


def _by_hash(hashes: Hashes, places: Places) -> tuple[Hashes, Places]:
    """Sort the k-grams at `places` by hash, then place. Return the hashes and the places in that order."""
    # Hash and place in one number: sorting these numbers is several times faster than a stable argsort.
    packed = hashes.take(places).astype(np.uint64) << np.uint64(32)
    packed |= places.astype(np.uint64)
    packed.sort()
    return (packed >> np.uint64(32)).astype(np.uint32), (packed & np.uint64(2**32 - 1)).astype(np.int64)


def runs_in(pair: Pair, spans: Sequence[Span], places: Places) -> Iterator[Match]:
    """
    Tile the target positions `spans` with runs of the source, each the longest of those tried at its start.

    The spans are sorted and do not overlap. `places`: positions of source k-grams that may occur in them.
    """
    starts = [np.arange(span.start, span.end - pair.k + 1) for span in spans if len(span) >= pair.k]
    if not starts or not len(places):
        return
    by_hash = _by_hash(pair.source_hashes, places)
    asked = starts[0] if len(starts) == 1 else np.concatenate(starts)
    wanted = pair.target_hashes.take(asked)
    lows = np.searchsorted(by_hash[0], wanted)
    hits = np.flatnonzero(by_hash[0].take(lows, mode="clip") == wanted)
    if not len(hits):
        return
    seeds, lows = asked[hits], lows[hits]
    cuts = seeds.searchsorted([(span.start, span.end) for span in spans])
    for number in np.flatnonzero(cuts[:, 0] < cuts[:, 1]).tolist():
        low, high = cuts[number].tolist()
        yield from _runs_from(pair, spans[number], seeds[low:high].tolist(), lows[low:high], by_hash)


def _runs_from(
    pair: Pair, within: Span, seeds: list[int], lows: npt.NDArray[np.intp], by_hash: tuple[Hashes, Places]
) -> list[Match]:
    """Return the runs of a span. The k-gram at target position `seeds[i]` is in `by_hash` from `lows[i]`."""
    source, target, k = pair.source, pair.target, pair.k
    hashes, positions = by_hash
    runs: list[Match] = []
    index = 0
    while index < len(seeds):
        at, low = seeds[index], int(lows[index])
        high = int(hashes.searchsorted(hashes[low], side="right"))
        run = _longest_run(source, target, Span(at, within.end), positions[low:high])
        index += 1
        if run is None or run.length < k:
            continue
        index = bisect_left(seeds, run.target_end, lo=index)
        add_run(runs, extended_left(run, source, target, floor=runs[-1].target if runs else within.start), k)
    return runs


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Number of leading tokens the two share; the time depends on that number, not on the lengths."""
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


def common_suffix_length(a: Ids, b: Ids) -> int:
    """Number of trailing tokens the two share."""
    return common_prefix_length(a[::-1], b[::-1])


def _longest_run(source: Ids, target: Ids, rest: Span, places: Places) -> Match | None:
    """Return the longest run that starts at `rest.start`; of equal ones that from the nearest position."""
    text = target[rest.start : rest.end]
    best: Match | None = None
    for place in _worth_trying(places, rest.start):
        length = common_prefix_length(source[place:], text)
        if length and (best is None or length > best.length):
            best = Match(place, rest.start, length)
    return best


def _worth_trying(places: Places, position: int) -> Sequence[int]:
    """Return at most four places, the nearest first: the first one at or after `position`, its neighbours,
    and the first place of all, whose run is the longest if all tokens are equal."""
    if len(places) > 4:
        nearest = int(np.searchsorted(places, position))
        near = places[max(nearest - 1, 0) : nearest + 2]
        places = np.append(near, places[0])
    ordered: list[int] = places.tolist()
    return sorted(ordered, key=lambda place: (abs(place - position), place))


def extended_left(run: Match, source: Ids, target: Ids, *, floor: int) -> Match:
    """The run with the equal tokens before it, down to target position `floor`."""
    more = common_suffix_length(source[: run.source], target[floor : run.target])
    return Match(run.source - more, run.target - more, run.length + more)


def add_run(runs: list[Match], run: Match, k: int) -> None:
    """
    Append a run that ends after the others; where it overlaps the last one, the shorter of the two is cut.

    The earlier run keeps at least `k` tokens. The new run is not appended if fewer than `k` of it are left.
    """
    while runs and run.target < runs[-1].target_end:
        last = runs[-1]
        if run.target_end <= last.target_end:
            return
        if run.target <= last.target:
            runs.pop()  # this run contains it
            continue
        left = max(k, run.target - last.target) if run.length > last.length else last.length
        runs[-1] = Match(last.source, last.target, left)
        cut = last.target + left - run.target
        run = Match(run.source + cut, run.target + cut, run.length - cut)
        break
    if run.length >= k:
        runs.append(run)
