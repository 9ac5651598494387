"""`kvshare doctor`: will it serve here, and if not, what to do."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kvshare.cli.exits import ExitCode
from kvshare.cli.options import Config, Format, OutputFormat
from kvshare.cli.output import show


def doctor(config: Config = None, output_format: Format = OutputFormat.TERMINAL) -> None:
    """Check this machine and this config: ok, warn or fail, each with a remedy. Exit code 1 if one fails."""
    from kvshare.cli.checks import State, run_checks

    checks = run_checks(config)
    healthy = all(check.state is not State.FAIL for check in checks)
    show("doctor", {"ok": healthy, "checks": [asdict(check) for check in checks]}, output_format)
    if not healthy:
        raise typer.Exit(ExitCode.FAILED)
