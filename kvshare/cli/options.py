"""The options that several commands share, so that they are spelled and explained once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    """How the answer is written to stdout."""

    TERMINAL = "terminal"
    JSON = "json"


Format = Annotated[OutputFormat, typer.Option("--format", help="terminal for people, json for programs.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="A YAML file with the settings that differ from the defaults."),
]
Url = Annotated[
    str | None, typer.Option("--url", help="Ask the running server at this address. [env: KVSHARE_URL]")
]
Key = Annotated[str | None, typer.Option("--key", help="The server's admin key. [env: KVSHARE_ADMIN_KEY]")]
Store = Annotated[
    Path | None,
    typer.Option("--store", help="Read this stopped store instead of asking a server. [default: store.path]"),
]
NamespaceDigest = Annotated[
    str | None,
    typer.Option("--namespace", help="Only this namespace: its digest, or enough of its first digits."),
]
