"""How commands declare options: options.toml says what each is for. And the options that several share."""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

_HELP = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def option(command: str, *flags: str, **settings: Any) -> Any:
    """An option of a command, or "shared" of several; options.toml has it under the first of its flags."""
    return typer.Option(*flags, help=_HELP[command][flags[0].removeprefix("--")], **settings)


def argument(command: str, name: str, **settings: Any) -> Any:
    """A positional argument of a command."""
    return typer.Argument(help=_HELP[command][name], **settings)


class OutputFormat(StrEnum):
    """How the answer is written to stdout."""

    TERMINAL = "terminal"
    JSON = "json"


Format = Annotated[OutputFormat, option("shared", "--format")]
Config = Annotated[Path | None, option("shared", "--config", "-c")]
Url = Annotated[str | None, option("shared", "--url")]
Key = Annotated[str | None, option("shared", "--key")]
Store = Annotated[Path | None, option("shared", "--store")]
NamespaceDigest = Annotated[str | None, option("shared", "--namespace")]
