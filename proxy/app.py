"""
Wires the server: routes, middlewares, the engine's lifetime, listeners and signals.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from kvshare.addresses import check_ports
from kvshare.background import Background, repeated, saved_often
from kvshare.collector import keep_freed_memory, make_collections_rare, take_short_turns
from kvshare.engine import Engine, GeneratingEngine
from kvshare.errors import ConfigError
from kvshare.loopback import is_loopback
from kvshare.settings import Settings, SettingsSource
from proxy import admin, azure
from proxy.auth import ANY_ORIGIN
from proxy.connection import FrontRunner
from proxy.context import SERVER, ServerContext
from proxy.dashboard import routes as dashboard
from proxy.generate import routes as generate
from proxy.lifecycle import Lifecycle
from proxy.live_settings import LiveSettings
from proxy.metrics import Metrics
from proxy.middleware import add_headers, observe
from proxy.openapi import routes as openapi
from proxy.parts import part_statuses, worst_states
from proxy.request_history import RequestHistory
from proxy.tracing import tracer_of
from proxy.usage import UsageLedger

log = logging.getLogger(__name__)

_BACKLOG = 2048  # connections that wait to be accepted; one beyond that is retried after a second
_LOOK_EVERY_S = 2.0  # how the parts are
_USAGE_KEPT_S = 60.0  # so often it is written
_CLOSE_S = 2.0  # connections that still write after a drain get this long


def build_app(settings: Settings, engine: Engine, source: SettingsSource | None = None) -> web.Application:
    """
    The application of the main port. It owns the engine: starts it in the background, stops it at cleanup.

    `source`: where the settings were read from, and can be read again.
    Raises:  ConfigError if two keys have one name or one hash, or the file of keys is wrong
    """
    lifecycle = Lifecycle(engine)
    metrics = Metrics(
        status=lambda: engine.status() if lifecycle.is_engine_up else None,
        num_inflight=lambda: lifecycle.num_running,
        parts=lambda status: worst_states(part_statuses(server, status)),
        model=lambda: engine.card.model_id,
    )
    live = LiveSettings(settings, engine, source)
    usage = UsageLedger(settings.store.path)
    live.on_change(lambda: metrics.name_tenants(live.keyring.tenants()))
    tracer = tracer_of(settings.tracing)
    server = ServerContext(live, engine, lifecycle, metrics, RequestHistory(), usage, tracer=tracer)
    app = _application(server, serves_clients=True, serves_admins=settings.server.admin_port is None)
    if tracer is not None:
        app.on_cleanup.append(lambda _: asyncio.to_thread(tracer.close))
    app.cleanup_ctx.append(lambda _: _usage_kept(usage))
    app.cleanup_ctx.append(lambda _: lifecycle.engine_running())
    app.cleanup_ctx.append(lambda _: _parts_watched(server))
    app.on_shutdown.append(lambda _: lifecycle.drain(0))  # what still runs ends with an error
    return app


def build_admin_app(app: web.Application) -> web.Application:
    """The application of the admin port, for the same server as `app`; it owns nothing."""
    return _application(app[SERVER], serves_clients=False, serves_admins=True)


async def serve(
    settings: Settings,
    engine: Engine,
    *,
    on_listening: Callable[[str], None],
    on_ready: Callable[[str], None] | None = None,
    source: SettingsSource | None = None,
) -> None:
    """
    Listen at once, load the engine meanwhile, drain at the first SIGTERM or SIGINT, stop at the second.

    `on_listening` and, once the engine is up, `on_ready` get the base URL, with the port that was taken where
    the settings say 0.
    Raises:  what the engine's start raises; EngineError for a port that cannot be used, before the engine
             begins to start
    """
    ports = check_ports(settings.server.host, settings.server.port, settings.server.admin_port)
    app = build_app(settings, engine, source)
    server = app[SERVER]
    lifecycle = server.lifecycle
    runners = [FrontRunner(app, shutdown_timeout=_CLOSE_S)]
    if settings.server.admin_port is not None:
        runners.append(FrontRunner(build_admin_app(app), shutdown_timeout=_CLOSE_S))
    _warn_if_exposed(server)
    with _stop_signals(server.live) as (first, second):
        try:
            for runner, port in zip(runners, ports, strict=True):
                await runner.setup()
                await web.TCPSite(runner, settings.server.host, port, backlog=_BACKLOG).start()
            url = _base_url(runners[0])
            on_listening(url)
            await _first_of(lifecycle.wait_started(), first.wait())
            make_collections_rare()
            take_short_turns()
            keep_freed_memory()
            if on_ready is not None and lifecycle.is_engine_up:
                on_ready(url)
            await first.wait()
            drain_s = server.settings.server.drain_s
            log.info("draining: %d requests run, at most %g s", lifecycle.num_running, drain_s)
            await _first_of(lifecycle.drain(drain_s), second.wait())  # the cleanup ends what still runs
            log.info("drained")
        finally:
            for runner in reversed(runners):
                await runner.cleanup()


@asynccontextmanager
async def _usage_kept(usage: UsageLedger) -> AsyncIterator[None]:
    """Read what an earlier run has saved, and write it now and then, and at the end."""
    await asyncio.to_thread(usage.load)
    async with saved_often(usage.save, every_s=_USAGE_KEPT_S):
        yield


def _parts_watched(server: ServerContext) -> AbstractAsyncContextManager[None]:
    """Read the parts' states regularly, so that times and log lines are right even if no client asks."""

    async def look() -> None:
        if server.lifecycle.is_engine_up:
            part_statuses(server, server.engine.status())

    return repeated(look, every_s=_LOOK_EVERY_S)


async def _first_of(*awaitables: Coroutine[Any, Any, object]) -> None:
    """Wait for one, cancel the others; raises what the finished one raised."""
    tasks = [asyncio.ensure_future(entry) for entry in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _stop_signals(live: LiveSettings) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first and the second SIGTERM or SIGINT, while inside. SIGHUP reads settings again."""
    first, second, reloading = asyncio.Event(), asyncio.Event(), Background()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    def on_hangup() -> None:
        reloading.spawn(_reload(live))

    handlers = {signal.SIGTERM: on_signal, signal.SIGINT: on_signal, signal.SIGHUP: on_hangup}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield first, second
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by default it would end the process


async def _reload(live: LiveSettings) -> None:
    try:
        await live.reload()
    except ConfigError as exc:
        log.error("SIGHUP: the settings are as before, as they could not be read again: %s", exc)


def _application(server: ServerContext, *, serves_clients: bool, serves_admins: bool) -> web.Application:
    app = web.Application(middlewares=[observe], client_max_size=server.settings.server.max_body_bytes)
    app[SERVER] = server
    app.on_response_prepare.append(add_headers)
    admin.add_routes(app, serves_admins=serves_admins)
    if serves_admins:
        dashboard.add_routes(app)
    engine = server.engine
    openapi.add_routes(app, is_relay=not isinstance(engine, GeneratingEngine))
    if isinstance(engine, GeneratingEngine):
        generate.add_routes(app, engine, serves_clients=serves_clients, serves_admins=serves_admins)
        _accept_trailing_slashes(app)
        return app
    from kvshare.fleet.engine import VllmEngine  # not for other engines: it takes part of their start
    from proxy.relay import routes as relay

    if not isinstance(engine, VllmEngine):
        raise TypeError(f"no routes for an engine of type {type(engine).__name__}")
    _accept_trailing_slashes(app)  # of /v1 it is vLLM that says which paths there are
    relay.add_routes(app, engine, serves_clients=serves_clients, serves_admins=serves_admins)
    return app


def _accept_trailing_slashes(app: web.Application) -> None:
    """`/v1/models/` is `/v1/models`: some clients join their URLs so. Azure's paths have their own."""
    for route in list(app.router.routes()):
        if route.resource is not None and not route.resource.canonical.startswith(azure.ROOT):
            app.router.add_route(route.method, f"{route.resource.canonical}/", route.handler)


def _base_url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_if_exposed(server: ServerContext) -> None:
    settings, is_open = server.settings, server.keyring.is_open
    if is_open and not is_loopback(settings.server.host):
        log.warning(
            "no API keys, and listening on %s: all clients share one namespace. Configure auth.keys",
            settings.server.host,
        )
    if is_open and ANY_ORIGIN in settings.server.cors_origins:
        log.warning(
            "no API keys and server.cors_origins is '*': every web page may use this server from a browser "
            "that reaches it; list the origins that should"
        )
