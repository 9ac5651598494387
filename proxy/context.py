"""The parts of one server, under a typed key. Its two ports, main and admin, have the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from kvshare.engine import Engine
from kvshare.parts import PartHistory
from kvshare.settings import RuleSettings, Settings
from proxy.activity import Activity
from proxy.auth import Keyring
from proxy.lifecycle import Lifecycle
from proxy.live_settings import LiveSettings
from proxy.metrics import Metrics
from proxy.request_history import RequestHistory
from proxy.tracing import Tracer
from proxy.usage import UsageLedger


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The objects that a handler needs besides its request."""

    live: LiveSettings
    engine: Engine
    lifecycle: Lifecycle
    metrics: Metrics
    history: RequestHistory
    usage: UsageLedger
    activity: Activity = field(default_factory=Activity)
    part_history: PartHistory = field(default_factory=PartHistory)
    tracer: Tracer | None = None

    @property
    def settings(self) -> Settings:
        """Return the settings in force now. Read them again for each request."""
        return self.live.settings

    @property
    def keyring(self) -> Keyring:
        return self.live.keyring

    @property
    def rules(self) -> tuple[RuleSettings, ...]:
        return self.live.settings.rules


SERVER: web.AppKey[ServerContext] = web.AppKey("server", ServerContext)
