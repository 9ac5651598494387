"""`kvshare doctor`: will it serve here, and if not, what to do."""

from __future__ import annotations

import sqlite3
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvshare.cli.exits import ExitCode
from kvshare.cli.options import Config, Format, OutputFormat
from kvshare.cli.output import show

if TYPE_CHECKING:
    from kvshare.cli.checks import Check


def doctor(config: Config = None, output_format: Format = OutputFormat.TERMINAL) -> None:
    """Check this machine and this config. Each finding comes with a remedy; one that fails is exit code 1."""
    from kvshare.cli.checks import State

    checks = run_checks(config)
    healthy = all(check.state is not State.FAIL for check in checks)
    show("doctor", {"ok": healthy, "checks": [asdict(check) for check in checks]}, output_format)
    if not healthy:
        raise typer.Exit(ExitCode.FAILED)


def run_checks(config: Path | None) -> list[Check]:
    """All checks; those that need the settings only when the config can be read."""
    from kvshare.cli import checks, model_checks, store_checks

    settings, readable = checks.check_config(config)
    machine = [
        checks.check_python(sys.version_info[:3]),
        checks.check_sqlite(sqlite3.sqlite_version_info),
        readable,
    ]
    if settings is None:
        return machine
    look_at = (
        model_checks.check_model,
        model_checks.check_tokenizer,
        model_checks.check_geometry,
        store_checks.check_store,
        store_checks.check_index,
        store_checks.check_embedder,
        checks.check_port,
    )
    return [*machine, checks.check_torch(), *(look(settings) for look in look_at)]
