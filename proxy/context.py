"""The parts of one server, under a typed key. Its two ports, main and admin, have the same."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from kvshare.engine import Engine
from kvshare.settings import RuleSettings, Settings
from proxy.auth import Keyring
from proxy.lifecycle import Lifecycle
from proxy.metrics import Metrics
from proxy.request_history import RequestHistory


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What a handler needs beside its request."""

    settings: Settings
    engine: Engine
    keyring: Keyring
    lifecycle: Lifecycle
    metrics: Metrics
    history: RequestHistory
    rules: tuple[RuleSettings, ...]


SERVER: web.AppKey[ServerContext] = web.AppKey("server", ServerContext)
