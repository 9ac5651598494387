"""
`kvshare doctor`: will it serve here, and if not, what to do. Or, with --vllm-url: how is that vLLM. And
`kvshare version`: what is installed.
"""

from __future__ import annotations

import os
import platform
import sqlite3
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvshare import __version__
from kvshare.cli import options
from kvshare.cli.options import OutputFormat
from kvshare.cli.output import ExitCode, show
from kvshare.errors import ConfigError
from kvshare.extras import missing_modules

if TYPE_CHECKING:
    from kvshare.cli.check import Check

_LIBRARIES = ("torch", "transformers", "qdrant-edge-py", "qdrant-client", "sentence-transformers")


def doctor(
    config: options.Config = None,
    vllm_url: options.RunningVllm = None,
    vllm_control_url: options.RunningConnector = None,
    vllm_data_parallel_size: options.RunningRanks = 1,
    url: options.Url = None,
    key: options.Key = None,
    output_format: options.Format = OutputFormat.TERMINAL,
) -> None:
    """
    Check this machine and this config, or a running vLLM. Each finding comes with a remedy.

    One that fails is exit code 1. From which length on sharing pays is asked of the running server at --url,
    by default the config's address: it has measured it.
    """
    from kvshare.cli.check import CheckState

    url = url or os.environ.get("KVSHARE_URL")
    if url is not None:
        options.checked_url(url, "--url")
    if vllm_url is not None:
        checks = run_vllm_checks(vllm_url, vllm_control_url, vllm_data_parallel_size)
    elif vllm_control_url is not None:
        raise typer.BadParameter("give --vllm-url too", param_hint="--vllm-control-url")
    else:
        checks = run_checks(config, url)
    checks += _check_running(config, url, key)
    healthy = all(check.state is not CheckState.FAIL for check in checks)
    show("doctor", {"ok": healthy, "checks": [asdict(check) for check in checks]}, output_format)
    if not healthy:
        raise typer.Exit(ExitCode.FAILED)


def version(output_format: options.Format = OutputFormat.TERMINAL) -> None:
    """Show what is installed: KVShare, Python and the libraries that matter."""
    from importlib import metadata  # a third of the time that --help takes

    from kvshare.vllm_protocol.versions import installed_version

    libraries: dict[str, str | None] = dict.fromkeys(_LIBRARIES)
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    libraries["vllm"] = installed_version()
    document = {"kvshare": __version__, "python": platform.python_version(), "libraries": libraries}
    show("version", document, output_format)


def run_checks(config: Path | None, url: str | None = None) -> list[Check]:
    """Return all checks; those of the settings only if the config can be read. `url`: a running server."""
    from kvshare.cli import checks, server_checks, store_checks
    from kvshare.cli.check import Checked

    settings, readable = checks.check_config(config)
    python = Checked.PYTHON.ok(platform.python_version())
    results = [python, checks.check_sqlite(sqlite3.sqlite_version_info), readable]
    if settings is None:
        return results
    if not missing_modules("embeddings"):
        results.append(checks.check_torch())
    missing = missing_modules("embedded", embeds=settings.index.dense)
    if settings.engine.kind == "vllm":
        results += server_checks.check_replicas(settings.vllm.replicas)
        results.append(server_checks.check_formats())
    elif missing:
        results.append(
            Checked.LIBRARIES.fail(
                f"the embedded engine needs libraries that are not installed: {', '.join(missing)}",
                "pip install 'kvshare[embedded]', or serve in front of vLLM: engine.kind: vllm",
            )
        )
    else:
        of_model = (checks.check_model, checks.check_tokenizer, checks.check_geometry)
        results += [check(settings) for check in of_model]
    of_store = (
        store_checks.check_store,
        store_checks.check_disk,
        store_checks.check_shared,
        store_checks.check_index,
        store_checks.check_embedder,
    )
    results += [check(settings) for check in of_store]
    return [*results, *checks.check_ports(settings, url), checks.check_pages(settings)]


def run_vllm_checks(url: str, control_url: str | None, data_parallel_size: int = 1) -> list[Check]:
    """Return all checks of one running vLLM and its ranks. Raises ConfigError for an address that is none."""
    from kvshare.cli import server_checks
    from kvshare.settings import load_settings

    replica = {"url": url, "control_url": control_url, "data_parallel_size": data_parallel_size}
    try:
        settings = load_settings(overrides={"vllm.replicas": [replica]})
    except ConfigError as exc:
        option = "--vllm-control-url" if exc.key_path.endswith("control_url") else "--vllm-url"
        raise ConfigError(option, str(exc).removeprefix(f"{exc.key_path}: ")) from exc
    return server_checks.check_replicas(settings.vllm.replicas)


def _check_running(config: Path | None, url: str | None, key: str | None) -> list[Check]:
    """Check what the server at `url` has measured; by default the one that the config names."""
    from kvshare.cli import checks, running_checks
    from kvshare.settings import load_settings

    if url is None:
        server = (checks.check_config(config)[0] or load_settings()).server
        host = f"[{server.host}]" if ":" in server.host else server.host
        url = f"http://{host}:{server.port}"
    key = key or os.environ.get("KVSHARE_ADMIN_KEY")
    running = [*running_checks.check_costs(url, key), running_checks.check_control(url, key)]
    return [*running, *running_checks.check_parts(url, key)]
