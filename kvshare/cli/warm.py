"""`kvshare warm`: compute documents and prompts before the first user asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvshare.cli.options import OutputFormat, argument, option
from kvshare.cli.output import ExitCode, is_quiet, note, show

_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


def warm(
    files: Annotated[list[Path], argument("warm", "files", metavar="FILE...", exists=True, dir_okay=False)],
    url: Annotated[str | None, option("warm", "--url")] = None,
    key: Annotated[str | None, option("warm", "--key", envvar="KVSHARE_API_KEY")] = None,
    pin: Annotated[bool, option("warm", "--pin")] = False,
    admin_key: Annotated[str | None, option("warm", "--admin-key", envvar="KVSHARE_ADMIN_KEY")] = None,
    admin_url: Annotated[str | None, option("warm", "--admin-url")] = None,
    concurrency: Annotated[int, option("warm", "--concurrency", min=1)] = 4,
    as_json: Annotated[bool, option("warm", "--json")] = False,
) -> None:
    """
    Compute documents and prompts ahead and store them, for all users of a key.

    A document is sent as a chat with one message. Later prompts that contain it copy its KV. If these have a
    fixed system prompt and heading before it, give it as a line of JSON with the same ones: more is copied
    then, and answers deviate less. Each line is sent unchanged, except that the answer has one token and only
    equal prefixes are shared, so that the stored KV is exact; its own "kvshare" takes precedence.
    """
    from rich.console import Console

    from kvshare.warming.entries import read_entries
    from kvshare.warming.run import WarmOptions, warm

    options = WarmOptions(
        url=_checked(url or os.environ.get("KVSHARE_URL"), "--url"),
        key=key,
        admin_url=None if admin_url is None else _checked(admin_url, "--admin-url"),
        admin_key=admin_key,
        pin=pin,
        concurrency=concurrency,
    )
    with Console(stderr=True, quiet=is_quiet()).status("reading") as status:
        document = warm(read_entries(files), options, lambda done: status.update(f"{done:,} finished"))
    show("warm", document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)
    if document["stored"] is None:
        note("the server says what was stored to an admin key only: --admin-key or KVSHARE_ADMIN_KEY")
    if document["evicted"]:
        note(f"{document['evicted']:,} of them were evicted since: the memory for KV is too small for all")
    if not document["complete"]:
        note("interrupted: only what was finished is counted")
        raise typer.Exit(_INTERRUPTED)
    if document["failed"]:
        raise typer.Exit(ExitCode.FAILED)


def _checked(url: str | None, option: str) -> str:
    if url is None or not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"expected http://host:port, got {url!r}", param_hint=option)
    return url
