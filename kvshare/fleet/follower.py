"""
Watches one replica for as long as the proxy runs: does vLLM serve, and what does its connector tell.

    health    asks every few seconds; an answer brings the names of the served model
    journal   info, then what is held, then event after event; a gap or a new epoch starts over

Whatever fails is tried again, with growing pauses. A replica that stays silent has lost its KV.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from delta_tree import SegmentId
from kvshare.errors import UpstreamError
from kvshare.fleet.replica import NAMESPACE_FIELDS, Replica
from kvshare.vllm_protocol.messages import Journal, JournalEvent, ReplicaInfo

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How often to ask, and how long to hope. Seconds."""

    health_interval_s: float
    journal_wait_s: float
    lost_after_s: float


class Audience(Protocol):
    """Who is told what a replica's journal says. Calls come one after the other, in order."""

    async def on_contact(self, replica: Replica, held: Iterable[SegmentId], *, is_new: bool) -> None:
        """The connector is heard, and holds these; `is_new`: it is another process than before."""

    async def on_event(self, replica: Replica, event: JournalEvent) -> None: ...

    async def on_lost(self, replica: Replica) -> None:
        """Not heard for too long."""

    async def on_round(self, replica: Replica) -> None:
        """The journal was read once more; time for what is due now and then."""


class Follower:
    """The tasks that watch one replica."""

    def __init__(
        self,
        replica: Replica,
        audience: Audience,
        times: WatchTimes,
        *,
        on_models: Callable[[Replica], None],
    ) -> None:
        """`on_models`: vLLM answers, after it did not; `replica.models` are known."""
        self._replica = replica
        self._audience = audience
        self._times = times
        self._on_models = on_models
        self._tasks: list[asyncio.Task[None]] = []
        self._last = 0  # sequence number of the last event that was dealt with
        self._is_in_step = False  # the account of what it holds is right, up to `_last`
        self._silent_since: float | None = None
        self._told: str | None = None  # the last failure in the log: each is told once
        self._asked_vllm = asyncio.Event()
        self._asked_connector = asyncio.Event()

    def start(self) -> None:
        name = self._replica.name
        self._tasks = [
            asyncio.create_task(self._watch_health(), name=f"health of {name}"),
            asyncio.create_task(self._watch_journal(), name=f"journal of {name}"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def has_answered(self) -> None:
        """Returns when vLLM and its connector have answered once, or failed to."""
        await self._asked_vllm.wait()
        await self._asked_connector.wait()

    async def check_health(self) -> None:
        """Ask vLLM now; its state is in `replica` afterwards."""
        replica = self._replica
        try:
            await replica.upstream.check_health()
            if replica.models is None:
                replica.models = await replica.upstream.models()
                log.info("replica %s serves %s", replica.name, ", ".join(replica.models.names))
                self._on_models(replica)
        except UpstreamError as exc:
            if replica.models is not None:
                log.warning("replica %s serves no more: %s", replica.name, exc)
            replica.models = None
        self._asked_vllm.set()

    async def _watch_health(self) -> None:
        while True:
            await self.check_health()
            await asyncio.sleep(self._times.health_interval_s)

    async def _watch_journal(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._contact()
                self._asked_connector.set()
                pause_s = _FIRST_PAUSE_S
                await self._read_on()
            except UpstreamError as exc:
                self._replica.is_heard = False
                self._asked_connector.set()
                self._tell(str(exc))
            except Exception as exc:
                self._replica.is_heard = self._is_in_step = False
                self._asked_connector.set()
                log.error("replica %s: its journal could not be dealt with", self._replica.name, exc_info=exc)
            await self._check_lost()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _contact(self) -> None:
        """From here on the account of what the replica holds is right, up to event `_last`."""
        replica = self._replica
        info = await replica.upstream.info()
        _check_info(info)
        is_new = replica.info is None or replica.info.epoch != info.epoch
        if is_new or not self._is_in_step:
            held = await replica.upstream.segments()
            if held.epoch != info.epoch:
                raise UpstreamError("the connector was restarted while it was asked")
            replica.info, self._last = info, held.last
            await self._audience.on_contact(replica, held.segment_ids, is_new=is_new)
            self._is_in_step = True
        replica.is_heard = True
        self._silent_since, self._told = None, None
        if is_new:
            _log_contact(replica, info)

    async def _read_on(self) -> None:
        """Returns where the state must be asked for anew: a gap, or another process."""
        while True:
            journal = await self._replica.upstream.journal(
                after=self._last, wait_s=self._times.journal_wait_s
            )
            if self._is_broken(journal):
                return
            for event in journal.events:
                await self._audience.on_event(self._replica, event)
            self._last = journal.last
            await self._audience.on_round(self._replica)

    def _is_broken(self, journal: Journal) -> bool:
        assert self._replica.info is not None, "read on only after a contact"
        if journal.epoch != self._replica.info.epoch:
            log.warning("replica %s was restarted: its KV is gone", self._replica.name)
            self._replica.is_heard = self._is_in_step = False
            return True
        if journal.gap or journal.last < self._last:
            log.warning("replica %s: events were missed, asking what it holds", self._replica.name)
            self._is_in_step = False
            return True
        return False

    async def _check_lost(self) -> None:
        now = time.monotonic()
        if self._replica.is_heard:
            return
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= self._times.lost_after_s and self._replica.info is not None:
            log.warning("replica %s is lost: %s", self._replica.name, self._told)
            self._replica.info = None
            await self._audience.on_lost(self._replica)

    def _tell(self, failure: str) -> None:
        """Each kind of failure once, whichever route it came from, until the connector is heard again."""
        kind = failure.partition(": ")[2]
        if kind != self._told:
            log.warning("replica %s shares nothing for now: %s", self._replica.name, failure)
            self._told = kind


def _check_info(info: ReplicaInfo) -> None:
    missing = [name for name in NAMESPACE_FIELDS if not info.namespace_fields.get(name)]
    if missing:
        raise UpstreamError(f"namespace_fields: expected {', '.join(missing)} as well")


def _log_contact(replica: Replica, info: ReplicaInfo) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(info.versions.items()))
    log.info("replica %s: connector heard, %d segments (%s)", replica.name, info.num_segments, versions)
    for refusal in info.refusals:
        log.warning("replica %s shares nothing: %s", replica.name, refusal)
    for warning in info.warnings:
        log.warning("replica %s: %s", replica.name, warning)
