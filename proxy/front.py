"""What every handler needs of the server it runs in, under one typed key."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from kvshare.engines.base import Engine
from kvshare.settings import Settings
from proxy.auth import Keyring
from proxy.lifecycle import Lifecycle
from proxy.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Front:
    """The parts of one server. Two listeners of it (main and admin port) have the same."""

    settings: Settings
    engine: Engine
    keyring: Keyring
    lifecycle: Lifecycle
    metrics: Metrics


FRONT: web.AppKey[Front] = web.AppKey("front", Front)
