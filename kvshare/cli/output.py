"""
Output and exit codes of commands. stdout has data, as JSON or through a view; stderr is for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import typer

from kvshare.cli.options import OutputFormat
from kvshare.errors import ConfigError, KVShareError, MissingExtraError, UnreachableError

if TYPE_CHECKING:
    from kvshare.cli.views import View

_quiet = False


class ExitCode(IntEnum):
    """Stable; scripts rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2  # wrong arguments, a wrong config file, or an extra that is not installed
    UNREACHABLE = 3  # no server answers
    INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


def exit_code(error: KVShareError) -> ExitCode:
    if isinstance(error, UnreachableError):
        return ExitCode.UNREACHABLE
    is_usage = isinstance(error, ConfigError | MissingExtraError)
    return ExitCode.USAGE if is_usage else ExitCode.FAILED


def hush() -> None:
    """Drop notes from now on (`kvshare -q`); data and errors are still written."""
    global _quiet
    _quiet = True


def is_quiet() -> bool:
    return _quiet


def show(view: str | View, document: Mapping[str, Any], output_format: OutputFormat) -> None:
    """Write the document to stdout. `view`: the name of one of `kvshare.cli.views.VIEWS`, or a view."""
    if output_format is OutputFormat.JSON:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from kvshare.cli import views

    views.draw(view, document)


def note(message: str) -> None:
    """A line for people, on stderr."""
    if not _quiet:
        typer.echo(message, err=True)
