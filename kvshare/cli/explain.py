"""`kvshare explain`: the plan that a prompt would get, with nothing computed and nothing stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshare.cli.options import Config, Format, Key, OutputFormat, Store, Url
from kvshare.cli.output import show
from kvshare.cli.source import open_source


def explain(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="One user message.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="A chat request or its messages as JSON; - reads stdin."),
    ] = None,
    url: Url = None,
    key: Key = None,
    store: Store = None,
    config: Config = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """The plan that a prompt would get. Which donors, why not others, what is copied and computed."""
    if (prompt is None) == (file is None):
        raise typer.BadParameter("expected exactly one of --prompt and --file")
    request = _one_turn(prompt) if prompt is not None else _read_request(file)
    source = open_source(url=url, key=key, store=store, config=config)
    show("explain", source.explain(request), output_format)


def _one_turn(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _read_request(file: Path | None) -> dict[str, Any]:
    """A request with `messages` from a file that holds the request, or only the messages."""
    try:
        text = sys.stdin.read() if str(file) == "-" else Path(str(file)).read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError) as exc:
        raise typer.BadParameter(f"{file} cannot be read as JSON: {exc}", param_hint="--file") from exc
    request = {"messages": document} if isinstance(document, list) else document
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise typer.BadParameter(
            f'{file}: expected a list of messages or an object with "messages"', param_hint="--file"
        )
    return request
