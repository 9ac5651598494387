"""
Watches one replica while the proxy runs: the health of its vLLM, and the journal of its connector.

    health    checked every few seconds; the first answer gives the names of the served model
    journal   reads /info, then /segments, then events; starts over after a gap or a restart of vLLM

Failed calls are repeated after growing pauses. A replica that is silent for too long has lost its KV.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field

from kvshare.errors import UpstreamError, WrongServerError
from kvshare.fleet.reconciler import Reconciler
from kvshare.fleet.replica import NAMESPACE_FIELDS, Fleet, Replica
from kvshare.safe_logging import classes_and_places
from kvshare.settings import VllmSettings
from kvshare.vllm_protocol.replica_info import ReplicaInfo

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_INFO_EVERY_S = 30.0
_STARTING_PAUSE_S = 0.5  # of a vLLM whose connector is there already


@dataclass(eq=False)
class Watcher:
    """Watches one replica of a fleet: `watch_health` and `watch_journal` run until they are cancelled."""

    _replica: Replica
    _fleet: Fleet
    _reconciler: Reconciler
    _settings: VllmSettings
    _last: int = 0  # sequence number of the last event that was applied
    _is_in_step: bool = False  # the tier has what the replica held at event `_last`
    _silent_since: float | None = None
    _asked_info_at: float = 0.0
    _is_no_vllm: bool = False  # that was logged
    _logged: str | None = None  # the last logged failure: each is logged once
    _may_serve: asyncio.Event = field(default_factory=asyncio.Event)  # set when its connector is connected
    _may_connect: asyncio.Event = field(default_factory=asyncio.Event)  # set when its vLLM serves
    asked_vllm: asyncio.Event = field(default_factory=asyncio.Event)  # set after the first answer or failure
    asked_connector: asyncio.Event = field(default_factory=asyncio.Event)  # the same
    was_connected: asyncio.Event = field(default_factory=asyncio.Event)  # set at the first connection
    has_listed: asyncio.Event = field(default_factory=asyncio.Event)  # set once it has said all that it holds

    @property
    def name(self) -> str:
        return self._replica.name

    async def watch_health(self) -> None:
        """
        A replica that serves is asked every `health_interval_s`; one that does not, sooner; and at once and
        often when its connector is connected, as it is about to serve.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._check_health()
            self.asked_vllm.set()
            pause_s = _FIRST_PAUSE_S if self._replica.models else 2 * pause_s
            longest_s = self._settings.health_interval_s
            if self._replica.is_connected and not self._replica.models:
                longest_s = min(longest_s, _STARTING_PAUSE_S)
            await _pause(longest_s if self._replica.models else min(pause_s, longest_s), self._may_serve)

    async def _check_health(self) -> None:
        replica = self._replica
        try:
            await replica.vllm.check_health()
            if replica.models is None:
                replica.models = await replica.vllm.models()
                replica.renders = True  # it may have been restarted
                log.info("replica %s serves %s", replica.name, ", ".join(replica.models.names))
                self._fleet.check_models(replica)
                self._may_connect.set()
        except UpstreamError as exc:
            if replica.models is not None:
                log.warning("replica %s gets no requests until it answers again: %s", replica.name, exc)
            elif isinstance(exc, WrongServerError) and not self._is_no_vllm:
                log.warning("replica %s gets no requests: %s", replica.name, exc)
            self._is_no_vllm = isinstance(exc, WrongServerError)
            replica.models = None

    async def watch_journal(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._connect()
                self.asked_connector.set()
                pause_s = _FIRST_PAUSE_S
                await self._read_journal()
            except UpstreamError as exc:
                self._replica.is_connected = False
                self._log_failure(str(exc))
            except Exception as exc:  # noqa: BLE001  logged, without its message
                self._replica.is_connected = self._is_in_step = False
                what = classes_and_places(exc)
                log.error(
                    "replica %s: applying its journal failed, trying again: %s", self._replica.name, what
                )
            self.asked_connector.set()
            await self._note_if_lost()
            await _pause(pause_s, self._may_connect)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        """Read what the replica is and holds. Afterwards the tier is correct as of event `_last`."""
        replica = self._replica
        info, self._asked_info_at = await replica.control.info(), time.monotonic()
        if missing := _missing_fields(info):
            raise UpstreamError(f"namespace_fields: {', '.join(missing)} missing")
        is_new = replica.info is None or replica.info.epoch != info.epoch
        if is_new or not self._is_in_step:
            held = await replica.control.segments()
            info = await replica.control.info()  # again: what began before `held.last` is not in the journal
            if held.epoch != info.epoch:
                raise UpstreamError("the connector was restarted between two calls")
            replica.info, self._last = info, held.last
            await self._reconciler.resync(replica, held.segment_ids, on_disk=held.on_disk, is_new=is_new)
            self._is_in_step = True
        replica.is_connected = True
        if replica.models is None:
            self._may_serve.set()
        self.was_connected.set()
        if not info.is_listing:
            self.has_listed.set()
        if is_new:
            _log_connected(replica, info)
            self._fleet.check_ranks(replica)
            self._fleet.check_stores(replica)
        elif self._logged is not None:
            log.warning("replica %s shares again: its connector answers", replica.name)
        self._silent_since, self._logged, replica.connector_problem = None, None, None

    async def _read_journal(self) -> None:
        """Apply events until a gap or a restart, after which the state must be read again."""
        replica = self._replica
        while True:
            journal = await replica.control.journal(after=self._last, wait_s=self._settings.journal_wait_s)
            assert replica.info is not None, "read only when connected"
            is_new = journal.epoch != replica.info.epoch
            if is_new or journal.gap or journal.last < self._last:
                replica.is_connected, self._is_in_step = not is_new, False
                lost = "restarted, its KV in memory is lost"
                what = lost if is_new else "missed events, its segments are read again"
                log.warning("replica %s: %s", replica.name, what)
                return
            for event in journal.events:
                await self._reconciler.apply(replica, event)
            self._last = journal.last
            await self._reconciler.tidy(replica)
            if replica.info.is_listing and not (await replica.control.info()).is_listing:
                self._is_in_step = False  # it has found all it has: that is read again
                return
            await self._renew_info()

    async def _renew_info(self) -> None:
        """Read its warnings again, now and then: whether a shared store answers is in no event."""
        replica, now = self._replica, time.monotonic()
        if replica.info is None or replica.info.is_listing or now - self._asked_info_at < _INFO_EVERY_S:
            return
        info, self._asked_info_at = await replica.control.info(), now
        if info.epoch == replica.info.epoch:  # else the journal says so next
            replica.info = info

    async def _note_if_lost(self) -> None:
        """Evict the prompts of a replica that was silent for too long. A failure is tried again."""
        replica, now = self._replica, time.monotonic()
        if replica.is_connected:
            return
        self._silent_since = self._silent_since or now
        if now - self._silent_since < self._settings.lost_after_s or replica.info is None:
            return
        try:
            what = await self._reconciler.evict_replica(replica)
            replica.info = None
            log.warning(
                "replica %s is lost, and %s: %s. Restart that vLLM, or remove it from vllm.replicas",
                *(replica.name, what, self._logged),
            )
        except Exception as exc:  # noqa: BLE001  logged, without its message
            what = classes_and_places(exc)
            log.error(
                "replica %s: evicting its prompts failed, trying again; please report this: %s",
                replica.name,
                what,
            )

    def _log_failure(self, failure: str) -> None:
        """Log each kind of failure once, from whichever route, until the connector is connected again."""
        kind = failure.partition(": ")[2]
        self._replica.connector_problem = kind or failure
        if kind != self._logged:
            log.warning("replica %s shares nothing for now: %s", self._replica.name, failure)
            self._logged = kind


def _missing_fields(info: ReplicaInfo) -> list[str]:
    """Return all of them while it starts. If it shares nothing, no worker may know their values."""
    fields = info.namespace_fields
    return [name for name in NAMESPACE_FIELDS if name not in fields or (info.shares and not fields[name])]


def _log_connected(replica: Replica, info: ReplicaInfo) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(info.versions.items()))
    log.info("replica %s: connected, %d segments (%s)", replica.name, info.num_segments, versions)
    for refusal in info.refusals:
        log.warning("replica %s shares nothing: %s", replica.name, refusal)
    if info.passing:
        log.warning("replica %s: requests pass unshared: %s", replica.name, info.passing)
    for warning in info.warnings:
        log.warning("replica %s: %s", replica.name, warning)


async def _pause(seconds: float, until: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(until.wait(), seconds)
    until.clear()
