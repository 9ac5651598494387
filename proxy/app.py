"""
Wires the server: routes, middlewares, the engine's lifetime, listeners and signals.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from kvshare.addresses import check_port
from kvshare.collector import make_collections_rare, take_short_turns
from kvshare.engine import Engine, GeneratingEngine
from kvshare.fleet.engine import VllmEngine
from kvshare.loopback import is_loopback
from kvshare.settings import Settings
from proxy import admin
from proxy.auth import ANY_ORIGIN, Keyring
from proxy.connection import FrontRunner
from proxy.context import SERVER, ServerContext
from proxy.generate import routes as generate
from proxy.lifecycle import Lifecycle
from proxy.metrics import Metrics
from proxy.middleware import add_headers, observe
from proxy.openapi import routes as openapi
from proxy.relay import routes as relay
from proxy.request_history import RequestHistory

log = logging.getLogger(__name__)

_BACKLOG = 2048  # connections that wait to be accepted; one beyond that is retried after a second
_CLOSE_S = 2.0  # connections that still write after a drain get this long


def build_app(settings: Settings, engine: Engine) -> web.Application:
    """
    The application of the main port. It owns the engine: starts it in the background, stops it at cleanup.

    Raises:  ConfigError if two keys have one name or one hash
    """
    lifecycle = Lifecycle(engine)
    metrics = Metrics(
        status=lambda: engine.status() if lifecycle.is_engine_up else None,
        num_inflight=lambda: lifecycle.num_running,
    )
    server = ServerContext(
        settings, engine, Keyring(settings.auth.keys), lifecycle, metrics, RequestHistory(), settings.rules
    )
    app = _application(server, serves_clients=True, serves_admins=settings.server.admin_port is None)
    app.cleanup_ctx.append(lambda _: lifecycle.engine_running())
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
) -> None:
    """
    Listen at once, load the engine meanwhile, drain at the first SIGTERM or SIGINT, stop at the second.

    `on_listening` and, once the engine is up, `on_ready` get the base URL, with the port that was taken where
    the settings say 0.
    Raises:  what the engine's start raises; EngineError for a port that cannot be used, before the engine
             begins to start
    """
    ports = _checked_ports(settings)
    app = build_app(settings, engine)
    lifecycle = app[SERVER].lifecycle
    runners = [FrontRunner(app, shutdown_timeout=_CLOSE_S)]
    if settings.server.admin_port is not None:
        runners.append(FrontRunner(build_admin_app(app), shutdown_timeout=_CLOSE_S))
    _warn_if_exposed(settings)
    with _stop_signals() as (first, second):
        try:
            for runner, port in zip(runners, ports, strict=True):
                await runner.setup()
                await web.TCPSite(runner, settings.server.host, port, backlog=_BACKLOG).start()
            url = _base_url(runners[0])
            on_listening(url)
            await _first_of(lifecycle.wait_started(), first.wait())
            make_collections_rare()
            take_short_turns()
            if on_ready is not None and lifecycle.is_engine_up:
                on_ready(url)
            await first.wait()
            drain_s = settings.server.drain_s
            log.info("draining: %d requests run, at most %g s", lifecycle.num_running, drain_s)
            await _first_of(lifecycle.drain(drain_s), second.wait())  # the cleanup ends what still runs
            log.info("drained")
        finally:
            for runner in reversed(runners):
                await runner.cleanup()


def _checked_ports(settings: Settings) -> list[int]:
    """The main port and, where there is one, the admin port; both can be listened on."""
    server = settings.server
    named = {"server.port (--port)": server.port, "server.admin_port": server.admin_port}
    ports = {setting: port for setting, port in named.items() if port is not None}
    for setting, port in ports.items():
        remedy = f"stop the server there, or set another {setting}; `kvshare doctor` says which server it is"
        check_port(server.host, port, setting=setting, remedy=remedy)
    return list(ports.values())


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
def _stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first and the second SIGTERM or SIGINT, while inside; SIGHUP does nothing then."""
    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    handlers = {signal.SIGTERM: on_signal, signal.SIGINT: on_signal, signal.SIGHUP: _ignore_hangup}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield first, second
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _ignore_hangup() -> None:
    """By default SIGHUP would end the process at once, without a drain."""
    log.warning("SIGHUP ignored: settings are read at start; restart to change them")


def _application(server: ServerContext, *, serves_clients: bool, serves_admins: bool) -> web.Application:
    app = web.Application(middlewares=[observe], client_max_size=server.settings.server.max_body_bytes)
    app[SERVER] = server
    app.on_response_prepare.append(add_headers)
    admin.add_routes(app, serves_admins=serves_admins)
    engine = server.engine
    openapi.add_routes(app, is_relay=isinstance(engine, VllmEngine))
    if isinstance(engine, GeneratingEngine):
        generate.add_routes(app, engine, serves_clients=serves_clients, serves_admins=serves_admins)
        _accept_trailing_slashes(app)
    elif isinstance(engine, VllmEngine):
        _accept_trailing_slashes(app)  # of /v1 it is vLLM that says which paths there are
        relay.add_routes(app, engine, serves_clients=serves_clients, serves_admins=serves_admins)
    else:
        raise TypeError(f"no routes for an engine of type {type(engine).__name__}")
    return app


def _accept_trailing_slashes(app: web.Application) -> None:
    """`/v1/models/` is `/v1/models`: some clients join their URLs so."""
    for route in list(app.router.routes()):
        if route.resource is not None:
            app.router.add_route(route.method, f"{route.resource.canonical}/", route.handler)


def _base_url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_if_exposed(settings: Settings) -> None:
    if not settings.auth.keys and not is_loopback(settings.server.host):
        log.warning(
            "no API keys, and listening on %s: all clients share one namespace. Configure auth.keys",
            settings.server.host,
        )
    if not settings.auth.keys and ANY_ORIGIN in settings.server.cors_origins:
        log.warning(
            "no API keys and server.cors_origins is '*': every web page may use this server from a browser "
            "that reaches it; list the origins that should"
        )
