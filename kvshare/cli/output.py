"""stdout is data, stderr is for people: a document goes out as JSON or through its view, notes beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from kvshare.cli.options import OutputFormat

_quiet = False


def hush() -> None:
    """Drop notes from now on (`kvshare -q`); data and errors are still written."""
    global _quiet
    _quiet = True


def is_quiet() -> bool:
    """Whether `hush` was called."""
    return _quiet


def show(view: str, document: Mapping[str, Any], output_format: OutputFormat) -> None:
    """Write the document to stdout; `view` is a key of `kvshare.cli.views.VIEWS`."""
    if output_format is OutputFormat.JSON:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from kvshare.cli import views

    views.draw(view, document)


def note(message: str) -> None:
    """A line for people, on stderr."""
    if not _quiet:
        typer.echo(message, err=True)


def fail(message: str) -> None:
    """The one line that says what went wrong, on stderr."""
    typer.echo(f"kvshare: {message}", err=True)
