"""
How fast this worker's passes and loads are. From that follows whether a pass may begin before its load has
arrived: whether every layer will arrive in time.

    layer          0      1      2      3
    needed     |---------|------|------|------      the pass, as short as similar ones were
    arrives    |--|-----------|---------|------|    the copies, as slow as the last ones were, with a margin
                       in time    late: the pass does not begin yet

Units: seconds and bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_MARGIN = 1.25  # factor on the copies' time
_MARGIN_S = 0.001  # added to it
_LOADS = 8
_PASSES = 32
_WAITS = 128  # passes after which a wait is forgotten: fewer than one in a hundred should be late


class _Pass(NamedTuple):
    num_tokens: int
    seconds: float
    is_plain: bool


class Paces:
    """
    The measured paces of one rank; other ranks may have measured others. Used by vLLM's thread.

    `seconds`: returns the time between two marks of the device; None while it is not past the second one.
    """

    def __init__(self, seconds: Callable[[Any, Any], float | None]) -> None:
        self._seconds = seconds
        self._passes = deque[_Pass](maxlen=_PASSES)
        self._under_way = deque[tuple[int, Any, Any, bool]](maxlen=_PASSES)
        self._per_byte = deque[float](maxlen=_LOADS)
        self._waits = deque[float](maxlen=_WAITS)

    def note_pass(self, num_tokens: int, began: Any, ended: Any, *, is_plain: bool = True) -> None:
        """
        Note a pass over all layers between two marks that waited for nothing. `is_plain`: it did not listen,
        either.
        """
        self._under_way.append((num_tokens, began, ended, is_plain))

    def note_early(
        self, num_tokens: int, seconds: float, *, waited_s: float, is_plain: bool = True, share: float = 1.0
    ) -> None:
        """
        Note a pass that began before its load had arrived, and waited `waited_s` of its `seconds`. `share`:
        of the layers, if it ended before the last one.
        """
        self._passes.append(_Pass(num_tokens, (seconds - waited_s) / share, is_plain))
        self._waits.append(waited_s)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """Note the copies of a load."""
        self._per_byte.append(seconds / num_bytes)

    def are_in_time(self, pending: Sequence[int], num_tokens: int, *, listens: bool = False) -> bool:
        """
        Return whether every layer arrives in time for a pass that begins now; False before any was measured.

        `listens`: the pass takes at least as long as one that does not listen, so both kinds count.
        `pending`: for each layer, how many bytes have yet to arrive until all of it has.
        """
        self._look()
        passes = [each for each in self._passes if listens or each.is_plain]
        if not self._per_byte or not passes:
            return False
        per_layer_s = _least_s(passes, num_tokens) / len(pending)
        per_byte_s = _MARGIN * max(self._per_byte)
        spare_s = _MARGIN_S + max(self._waits, default=0.0)
        return all(
            not num_bytes or num_bytes * per_byte_s + spare_s <= layer * per_layer_s
            for layer, num_bytes in enumerate(pending)
        )

    def _look(self) -> None:
        """Take over the times of passes that the device has finished."""
        waiting, self._under_way = self._under_way, deque(maxlen=_PASSES)
        for num_tokens, began, ended, is_plain in waiting:
            if (seconds := self._seconds(began, ended)) is None:
                self._under_way.append((num_tokens, began, ended, is_plain))
            else:
                self._passes.append(_Pass(num_tokens, seconds, is_plain))


def _least_s(passes: Sequence[_Pass], num_tokens: int) -> float:
    """
    Return the least time of a pass of so many tokens.

    It assumes that a longer pass takes no less time, and that each further token takes no less than those
    before. So beyond the largest measured pass the time grows at least as it grew up to there. A pass smaller
    than all measured ones lies on the line through the smallest and the largest, or takes its share of one.
    """
    sizes = sorted({each.num_tokens for each in passes})
    known = [size for size in sizes if size <= num_tokens] or sizes
    first, last = known[0], known[-1]
    first_s, last_s = _shortest_s(passes, first), _shortest_s(passes, last)
    slope = (last_s - first_s) / (last - first) if last > first else 0.0
    if first > num_tokens:
        shares = (num_tokens / each.num_tokens * each.seconds for each in passes)
        return max(min(shares), first_s - slope * (first - num_tokens) if last > first else 0.0)
    return last_s + slope * (num_tokens - last)


def _shortest_s(passes: Sequence[_Pass], num_tokens: int) -> float:
    """Return the least seconds of the passes with as many tokens or more."""
    return min(each.seconds for each in passes if each.num_tokens >= num_tokens)
