"""Where handlers find the engine that generates here."""

from __future__ import annotations

from aiohttp import web

from kvshare.engines.base import GeneratingEngine

ENGINE: web.AppKey[GeneratingEngine] = web.AppKey("generating_engine", GeneratingEngine)
