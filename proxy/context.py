"""What handlers need of the server they run in, under typed keys."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from kvshare.engines.base import Engine, GeneratingEngine
from kvshare.settings import Settings
from proxy.auth import Keyring
from proxy.lifecycle import Lifecycle
from proxy.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of one server. Two listeners of it (main and admin port) have the same."""

    settings: Settings
    engine: Engine
    keyring: Keyring
    lifecycle: Lifecycle
    metrics: Metrics


GENERATING: web.AppKey[GeneratingEngine] = web.AppKey("generating", GeneratingEngine)
SERVER: web.AppKey[ServerContext] = web.AppKey("server", ServerContext)
