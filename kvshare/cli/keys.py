"""`kvshare hash-key`: config.yaml holds the hash of an API key, never the key."""

from __future__ import annotations

import hashlib
import secrets
import sys
from typing import Annotated

import typer

from kvshare.cli.options import Format, OutputFormat, option
from kvshare.cli.output import note, show

_PREFIX = "kvs-"
_NUM_RANDOM_BYTES = 32


def hash_key(
    generate: Annotated[bool, option("hash-key", "--generate", "-g")] = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Hash an API key for `auth.keys`. The key is read from stdin, or made with --generate."""
    key = _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES) if generate else _read_key()
    digest = {"sha256": hashlib.sha256(key.encode()).hexdigest()}
    if generate:
        note("Keep the key: it is not stored anywhere.")
    show("key", {"key": key, **digest} if generate else digest, output_format)


def _read_key() -> str:
    if sys.stdin.isatty():
        key = str(typer.prompt("API key", hide_input=True, err=True))
    else:
        key = sys.stdin.readline()
    key = key.strip()  # as the server does with what a client sends
    if not key:
        raise typer.BadParameter("expected an API key on stdin, or --generate")
    return key
