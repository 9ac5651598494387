"""`kvshare hash-key`: config.yaml holds the hash of an API key, never the key."""

from __future__ import annotations

import hashlib
import secrets
import sys
from typing import Annotated

import typer

from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import note, show

_PREFIX = "kvs-"
_NUM_RANDOM_BYTES = 32


def hash_key(
    generate: Annotated[
        bool, typer.Option("--generate", "-g", help="Make a new random key and show it once.")
    ] = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Hash an API key for `auth.keys`. The key is read from stdin, or made with --generate."""
    if generate:
        key = _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
        note("Keep the key: it is not stored anywhere.")
        show("key", {"key": key, "sha256": _sha256(key)}, output_format)
        return
    show("key", {"sha256": _sha256(_read_key())}, output_format)


def _read_key() -> str:
    if sys.stdin.isatty():
        key = str(typer.prompt("API key", hide_input=True, err=True))
    else:
        key = sys.stdin.readline()
    key = key.strip()  # as the server does with what a client sends
    if not key:
        raise typer.BadParameter("expected an API key on stdin, or --generate")
    return key


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
