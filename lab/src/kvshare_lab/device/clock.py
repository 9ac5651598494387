"""
Virtual time, shared by actors: threads of which one runs at a time, always the one that is furthest behind.

An actor spends time without giving way. Where it looks at others or waits for them, all actors that are
earlier run first. So what it sees is what had happened by its own time, and a run is the same every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from kvshare.errors import KVShareError


class StandstillError(KVShareError):
    """Every actor waits for another one."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"the simulation stands still: {', '.join(names)} wait for each other")


@dataclass(eq=False)
class _Actor:
    """`until`: when it goes on although it was not woken; None while it does not wait."""

    name: str
    now: float
    until: float | None = None
    error: BaseException | None = None
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def due(self) -> float:
        return self.now if self.until is None else max(self.now, self.until)


class Clock:
    """Made by the first actor, in its thread. `now` is the time of the actor that asks. Units: seconds."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._own.actor = _Actor("main", 0.0)
        self._actors: list[_Actor] = [self._own.actor]

    @property
    def _me(self) -> _Actor:
        found: _Actor = self._own.actor
        return found

    def now(self) -> float:
        return self._me.now

    def spend(self, seconds: float) -> None:
        """Work for so long."""
        self._me.now += seconds

    def settle(self) -> None:
        """Let every actor that is earlier run up to this time."""
        self._give_way()

    def sleep_until(self, at: float) -> None:
        self._me.now = max(self._me.now, at)
        self._give_way()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """A new actor, from now on. An error in it ends the simulation."""
        actor, creator = _Actor(name, self.now()), self._actors[0]

        def run() -> None:
            self._own.actor = actor
            actor.baton.acquire()
            try:
                work()
            except BaseException as exc:  # noqa: BLE001  raised where the first actor goes on
                creator.error = exc
            self._actors.remove(actor)
            if (following := self._next()) is not None:
                following.baton.release()

        self._actors.append(actor)
        threading.Thread(target=run, name=name, daemon=True).start()

    def wait(self, event: Event, timeout_s: float | None = None) -> bool:
        """Until the event is set, or so many seconds have passed. Returns whether it is set."""
        self._give_way()
        if not event.is_set_at(self.now()):
            me = self._me
            me.until = min(event.at, inf if timeout_s is None else me.now + timeout_s)
            event.waiting.append(me)
            self._give_way()
            if me in event.waiting:
                event.waiting.remove(me)
            me.now, me.until = me.due, None
        return event.is_set_at(self.now())

    def wake(self, actors: list[_Actor]) -> None:
        for actor in actors:
            actor.until = self.now() if actor.until is None else min(actor.until, self.now())

    def _next(self) -> _Actor | None:
        first = min(self._actors, key=lambda actor: actor.due, default=None)
        if first is not None and first.due == inf:
            first = self._actors[0]
            first.error = first.error or StandstillError([actor.name for actor in self._actors])
        return first

    def _give_way(self) -> None:
        me, following = self._me, self._next()
        others_turn = following is not None and following is not me
        if following is not None and others_turn and (following.due < me.due or me.until is not None):
            following.baton.release()
            me.baton.acquire()
        if me.error is not None:
            raise me.error


@dataclass(eq=False)
class Event:
    """Set once, at the time of the actor that sets it; a stand-in for `threading.Event`."""

    clock: Clock
    at: float = inf
    waiting: list[_Actor] = field(default_factory=list)

    def set(self) -> None:
        self.at = min(self.at, self.clock.now())
        waiting, self.waiting = self.waiting, []
        self.clock.wake(waiting)

    def is_set_at(self, time: float) -> bool:
        return self.at <= time

    def is_set(self) -> bool:
        self.clock.settle()
        return self.is_set_at(self.clock.now())

    def wait(self, timeout: float | None = None) -> bool:
        return self.clock.wait(self, timeout)
