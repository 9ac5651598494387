"""
How commands declare options: options.toml says what each is for, and of those that are only passed on also
type, limits and default. And the options that several commands share.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Command = Callable[..., None]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TYPES = {"text": str, "texts": list[str], "int": int, "float": float, "path": Path, "flag": bool}


def described(file: Path) -> dict[str, Any]:
    """A TOML file of options, as Python reads it without importing anything heavy."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


_OPTIONS = described(Path(__file__).with_suffix(".toml"))


def option(command: str, *flags: str, **settings: Any) -> Any:
    """An option of a command, or "shared" of several; options.toml has it under the first of its flags."""
    return typer.Option(*flags, help=_OPTIONS[command][flags[0].removeprefix("--")], **settings)


def argument(command: str, name: str, **settings: Any) -> Any:
    return typer.Argument(help=_OPTIONS[command][name], **settings)


def with_options(command: str, table: Mapping[str, Any] = _OPTIONS) -> Callable[[Command], Command]:
    """Gives a function the options that the table describes in full, in place of its `**options`."""

    def change(function: Command) -> Command:
        own = signature(function, eval_str=True).parameters.values()
        options = [parameter(name, **each) for name, each in table[command].items() if isinstance(each, dict)]
        options += [each for each in own if each.kind is not Parameter.VAR_KEYWORD]
        chosen = Signature(sorted(options, key=lambda each: each.kind))  # positional ones first
        function.__signature__ = chosen  # type: ignore[attr-defined]  # as functions may
        return function

    return change


def parameter(
    name: str,
    *,
    type: str | Sequence[str] = "int",
    default: object = None,
    flags: Sequence[str] = (),
    **settings: Any,
) -> Parameter:
    """
    An option as Typer reads it from a function; None where it is not given, unless it has a default.

    `type`: one of `_TYPES`, or the words that may be given
    """
    option = typer.Option(default, *(flags or [f"--{name.replace('_', '-')}"]), **settings)
    kind: Any = _TYPES[type] if isinstance(type, str) else Literal.__getitem__(tuple(type))
    annotation = kind | None if default is None else kind
    return Parameter(name, Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def checked_url(url: str | None, option: str) -> str:
    """Return the URL of the option. Raises a usage error if it is missing or not an http(s) URL."""
    if url is None or not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"expected http://host:port, got {url!r}", param_hint=option)
    return url


def seconds(text: str, option: str) -> int:
    """A duration like 90s, 30m, 12h or 7d. Raises a usage error for another one."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(
            f"expected a duration like 90s, 30m, 12h or 7d, got {text!r}", param_hint=option
        )
    return int(match[1]) * _SECONDS[match[2]]


class OutputFormat(StrEnum):
    """The format of the answer on stdout."""

    TERMINAL = "terminal"
    JSON = "json"


Format = Annotated[OutputFormat, option("shared", "--format")]
Config = Annotated[Path | None, option("shared", "--config", "-c")]
Url = Annotated[str | None, option("shared", "--url")]
Key = Annotated[str | None, option("shared", "--key")]
Store = Annotated[Path | None, option("shared", "--store")]
NamespaceDigest = Annotated[str | None, option("shared", "--namespace")]
TenantName = Annotated[str | None, option("shared", "--tenant")]
