"""
`kvshare serve`: resolves the settings, builds the engine, hands both to the HTTP front. And `kvshare
hash-key`: its config holds the hash of an API key, never the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer

from kvshare.addresses import check_ports
from kvshare.cli import options
from kvshare.cli.open_files import raise_open_files
from kvshare.cli.options import OutputFormat
from kvshare.cli.output import is_quiet, note, show
from kvshare.errors import ConfigError, EngineError
from kvshare.extras import require, unseen

if TYPE_CHECKING:
    from kvshare.engine import Engine
    from kvshare.settings import Settings, SettingsSource

log = logging.getLogger(__name__)


def serve(
    config: options.Config = None,
    host: options.Host = None,
    port: options.Port = None,
    model: options.Model = None,
    served_name: options.ServedName = None,
    store: options.StoreFolder = None,
    mode: options.Mode = None,
    dtype: options.Dtype = None,
    engine: options.Engine = None,
    vllm_url: options.VllmUrls = None,
    vllm_control_url: options.VllmControlUrls = None,
    vllm_data_parallel_size: options.VllmRanks = None,
    dry_run: options.PrintSettings = False,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """Serve a model over an OpenAI-shaped API. Listens on loopback by default."""
    from kvshare import safe_logging
    from kvshare.settings import SettingsSource

    options_by_path = {
        "vllm.replicas": _replicas(vllm_url, vllm_control_url, vllm_data_parallel_size),
        "server.host": host,
        "server.port": port,
        "model.path": model,
        "model.served_name": served_name,
        "store.path": None if store is None else str(store),
        "sharing.mode": mode,
        "model.dtype": dtype,
        "engine.kind": engine,
    }
    overrides = {path: value for path, value in options_by_path.items() if value is not None}
    source = SettingsSource(config, overrides)
    settings = source.load()
    if served_name is not None and settings.engine.kind == "vllm":
        raise ConfigError(
            "--served-name",
            "vLLM names its models: start it with --served-model-name, also by `kvshare vllm`",
        )
    if dry_run:
        show("settings", settings.model_dump(mode="json", by_alias=True), output_format)
        return

    level = "error" if is_quiet() else settings.logging.level
    safe_logging.configure(level=level, json_lines=settings.logging.json_lines)
    raise_open_files()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server listens, and reads settings again
    _run(settings, output_format, source)


def hash_key(
    generate: options.Generate = False, output_format: options.Format = OutputFormat.TERMINAL
) -> None:
    """Hash an API key for `auth.keys`. The key is read from stdin, or made with --generate."""
    key = "kvs-" + secrets.token_urlsafe(32) if generate else _read_key()
    digest = {"sha256": hashlib.sha256(key.encode()).hexdigest()}
    if generate:
        note("Keep the key: it is not stored anywhere.")
    show("key", {"key": key, **digest} if generate else digest, output_format)


def _replicas(
    urls: Sequence[str] | None, control_urls: Sequence[str] | None, data_parallel_size: int | None
) -> list[dict[str, Any]] | None:
    """Return the `vllm.replicas` that the options stand for; None where there are none."""
    urls, control_urls = urls or [], control_urls or []
    if control_urls and len(control_urls) != len(urls):
        raise ConfigError(
            "--vllm-control-url", f"expected one per --vllm-url ({len(urls)}), got {len(control_urls)}"
        )
    return [
        {"url": url, "control_url": control_url, "data_parallel_size": data_parallel_size or 1}
        for url, control_url in zip_longest(urls, control_urls)
    ] or None


def _run(settings: Settings, output_format: OutputFormat, source: SettingsSource) -> None:
    """
    Load the engine's code, then listen; the engine starts while the server already answers /health.

    Raises:  EngineError for a port that cannot be used, before anything is loaded
    """
    started = time.perf_counter()
    from kvshare.collector import no_collections

    check_ports(settings.server.host, settings.server.port, settings.server.admin_port)
    # transformers would import scikit-learn and scipy for what is not used here: a second.
    with no_collections(), unseen("sklearn", "scipy"):
        from proxy.app import serve as serve_http

        engine, doing = _engine(settings)

    def listening(url: str) -> None:
        if settings.logging.json_lines:
            log.info("listening on %s, %s", url, doing)
        else:
            note(f"listening on {url}, {doing}")

    def announce(url: str) -> None:
        ready_s = time.perf_counter() - started
        show("ready", {"url": url, "model": engine.card.model_id, "ready_s": ready_s}, output_format)

    try:
        asyncio.run(serve_http(settings, engine, on_listening=listening, on_ready=announce, source=source))
    except OSError as exc:
        # asyncio's text has the address, which may be the admin port's.
        raise EngineError(f"cannot serve: {exc.strerror or exc}; `kvshare doctor` says more") from exc


def _engine(settings: Settings) -> tuple[Engine, str]:
    """Return the engine, which is not started, and what its start does."""
    if settings.engine.kind == "vllm":
        from kvshare.fleet.engine import VllmEngine

        return VllmEngine(settings), "asking the replicas"
    what = "`kvshare serve` with the embedded engine"
    require("embedded", what=what, embeds=settings.index.dense)
    from kvshare.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(settings), "loading the model"


def _read_key() -> str:
    if sys.stdin.isatty():
        key = str(typer.prompt("API key", hide_input=True, err=True))
    else:
        key = sys.stdin.readline()
    key = key.strip()  # as the server does with what a client sends
    if not key:
        raise typer.BadParameter("expected an API key on stdin, or --generate")
    return key
