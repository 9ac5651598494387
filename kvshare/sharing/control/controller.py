"""
Watches whether sharing pays on this server, at each load, and reduces it where it does not.

A small share of time, in blocks drawn at random, is served without sharing. A sequential test compares
throughput and times of both. If sharing is slower, less is shared, rung by rung; then a small share of time
is served one rung higher, and sharing returns when that is faster. Nothing of this outlives the process: a
server starts with everything shared.

Knows neither HTTP nor engines. Thread-safe.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from delta_tree import TokenIds
from kvshare.reasons import Reason
from kvshare.settings import ControlSettings
from kvshare.sharing.control.acceptance import Acceptance
from kvshare.sharing.control.blocks import Arm, TimeBlock
from kvshare.sharing.control.load_level import LoadLevel, RungChange
from kvshare.sharing.control.repeats import Repeats
from kvshare.sharing.control.rungs import Rung
from kvshare.sharing.control.treatment import Treatment
from kvshare.status import ControlStatus, LoadStatus

log = logging.getLogger(__name__)

_DURATIONS = 3  # the least length of a block in durations of a request: most in flight belong to the block
_MOST_BLOCK_S = 120.0
_CROWD = 4  # a block ends early at more requests in flight than twice those at its start plus this
_HIGHEST_LOAD = 13  # 4096 requests in flight, and more
_DURATION_WEIGHT = 1 / 32  # weight of the newest request in the mean duration


class Controller:
    """Called at the beginning and the end of every request that may share."""

    def __init__(
        self,
        settings: ControlSettings,
        *,
        full_s: Callable[[int], float],
        break_even: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """
        `full_s`: the seconds of a prefill of so many tokens without sharing, by the learned costs.
        `break_even`: the shortest prompt, in tokens, for which sharing pays by them; infinite if none does.
        """
        self._settings = settings
        self._full_s, self._break_even = full_s, break_even
        self._clock, self._chance = clock, chance
        self._lock = threading.Lock()
        self._levels: dict[int, LoadLevel] = {}
        self._block: TimeBlock | None = None
        self._duration_s = 0.0  # moving mean over requests
        self._num_requests: Counter[Arm] = Counter()
        self._num_running = 0
        self._changes = {"reduced": 0, "returned": 0}
        self._repeats = Repeats()
        self._acceptance = Acceptance(settings.confidence)
        self._stopped_at = -math.inf  # when sharing was last stopped because of `Acceptance`

    @contextmanager
    def take(self, num_tokens: int, num_in_flight: int) -> Iterator[Treatment]:
        """
        Decide how a request is served. It counts as in flight until the context ends.

        `num_in_flight`: requests at the engine that is going to compute it, with this one; if several engines
        may compute it, their mean
        """
        treatment = self._begin(num_tokens, num_in_flight)
        try:
            yield treatment
        finally:
            self._end(treatment)

    def may_save(self, treatment: Treatment, namespace: str, token_ids: TokenIds, *, num_reused: int) -> bool:
        """Return whether to store the KV of a prompt. `num_reused`: tokens that its plan copies."""
        if treatment.refusal is not None:
            return False
        if treatment.saves_all:
            return True
        reused = num_reused / max(1, len(token_ids))
        return self._repeats.is_worth_saving(namespace, token_ids, reused=reused)

    def note_steps(self, treatment: Treatment, num_tokens: int, num_steps: int) -> None:
        """
        Note the tokens and steps of an answer, if the engine decodes speculatively.

        Once it is certain that answers take more steps with sharing, it stops at all loads seen so far.
        """
        if treatment.block is None or treatment.refusal is Reason.REDUCED:
            return
        now = self._clock()
        with self._lock:
            # A block that began before sharing was stopped says nothing new.
            if treatment.block.began <= self._stopped_at:
                return
            more_steps = self._acceptance.add(treatment.block, num_tokens, num_steps)
            if more_steps is None:
                return
            self._stopped_at = now
            for level in self._levels.values():
                if level.stop(now):
                    self._changes["reduced"] += 1
            self._leave_block()
        log.warning(
            "sharing stops: drafts are accepted less often with it, answers take %.0f %% more steps; it is "
            "tried from time to time. See docs/operating.md for what to do",
            100 * more_steps,
        )

    def status(self) -> ControlStatus:
        """Return what is shared at each load that was seen, and why."""
        with self._lock:
            return ControlStatus(
                unshared_share=self._settings.unshared_share,
                num_requests={str(arm): self._num_requests[arm] for arm in Arm},
                changes=dict(self._changes),
                loads=tuple(_status(self._levels[load]) for load in sorted(self._levels)),
            )

    def _begin(self, num_tokens: int, num_in_flight: int) -> Treatment:
        with self._lock:
            block = self._current_block(self._clock(), max(1, num_in_flight))
            rung, arm = block.rung, block.arm
            refusal = None
            if not rung.shares(num_tokens, self._break_even):
                refusal = Reason.REDUCED
            elif arm is Arm.UNSHARED:  # only requests that would be shared: both arms have the same kinds
                refusal = Reason.EXPERIMENT
            # At first most requests in flight are from earlier blocks, and this one does not count, even if
            # those were served alike: as loads change within a block, all arms must skip the same part of it.
            is_representative = 2 * block.num_running >= self._num_running
            block.num_running += 1
            block.num_arrived += 1
            block.sum_in_flight += max(1, num_in_flight)
            self._num_requests[arm] += 1
            self._num_running += 1
            return Treatment(
                refusal=refusal,
                saves_all=rung.saves_all,
                block=block,
                num_tokens=num_tokens,
                began=self._clock(),
                counts=is_representative,
            )

    def _current_block(self, now: float, num_in_flight: int) -> TimeBlock:
        """
        Return the block of a request that arrives now. A block is only replaced when a request arrives.
        """
        block, load = self._block, _load_of(num_in_flight)
        if block is not None:
            age_s = now - block.began
            # If an arm cannot keep up, its block ends before the queue is long.
            is_crowded = num_in_flight > 2 * block.first_in_flight + _CROWD
            if age_s < self._block_s and not is_crowded:
                return block
            block.is_over = True
            if age_s < 2 * self._block_s and not is_crowded:  # the mean says more than one moment
                load = _load_of(block.mean_in_flight)
            if not block.num_running:
                self._fold(block, now)
        level = self._level(load)
        may_experiment = self._num_requests.total() >= self._settings.first_requests
        arm, counts = level.arm(self._chance, now, may_experiment=may_experiment)
        rung = level.rung.higher if arm is Arm.TRIAL else level.rung
        self._block = TimeBlock(arm, rung, load, level.epoch, now, num_in_flight, level.token_s, counts)
        return self._block

    def _leave_block(self) -> None:
        if self._block is not None:
            self._block.is_over, self._block = True, None

    @property
    def _block_s(self) -> float:
        return min(_MOST_BLOCK_S, max(self._settings.block_s, _DURATIONS * self._duration_s))

    def _level(self, load: int) -> LoadLevel:
        chosen = self._settings
        if load not in self._levels:
            self._levels[load] = LoadLevel(load, share=chosen.unshared_share, confidence=chosen.confidence)
        return self._levels[load]

    def _end(self, treatment: Treatment) -> None:
        block, now = treatment.block, self._clock()
        assert block is not None, "given by `_begin`"
        with self._lock:
            block.num_running -= 1
            self._num_running -= 1
            if treatment.completed_tokens is not None:
                self._learn(treatment, block, now - treatment.began, treatment.completed_tokens)
            if block.is_settled:
                self._fold(block, now)

    def _learn(self, treatment: Treatment, block: TimeBlock, seconds: float, num_output: int) -> None:
        self._duration_s += _DURATION_WEIGHT * (seconds - self._duration_s)
        full_s = self._full_s(treatment.num_tokens)
        block.add(seconds, full_s, num_output, counts=treatment.counts)

    def _fold(self, block: TimeBlock, now: float) -> None:
        if (change := self._level(block.load).fold(block, now)) is not None:
            self._changes["reduced" if change.after > change.before else "returned"] += 1
            if self._block is not None and self._block.load == change.load:
                self._leave_block()  # the next request is served on the other rung
            _log(change)


def _load_of(num_in_flight: int) -> int:
    """Return the load level, the number of bits: 1, 2 to 3, 4 to 7, ..."""
    return min(_HIGHEST_LOAD, num_in_flight.bit_length())


def _label(load: int) -> str:
    first, last = 2 ** (load - 1), 2**load - 1
    if load == _HIGHEST_LOAD:
        return f"{first}+"
    return str(first) if first == last else f"{first}-{last}"


def _status(level: LoadLevel) -> LoadStatus:
    contest = level.against_higher if level.rung is Rung.NOTHING else level.against_nothing
    num_more, num_less = contest.num_blocks
    return LoadStatus(
        load=_label(level.load),
        rung=int(level.rung),
        shared=level.rung.text,
        slower=contest.slower,
        num_blocks_more=num_more,
        num_blocks_less=num_less,
    )


def _log(change: RungChange) -> None:
    load, now = _label(change.load), change.after.text
    if change.after > change.before:
        log.warning(
            "sharing is reduced with %s requests in flight: it made them %.0f %% slower; now %s, and more is "
            "tried from time to time. See docs/operating.md for what to do",
            *(load, 100 * change.slower, now),
        )
    else:
        log.info(
            "sharing returns with %s requests in flight: more of it made them %.0f %% faster; now %s",
            *(load, -100 * change.slower, now),
        )
