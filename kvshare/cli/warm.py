"""`kvshare warm`: compute documents and prompts before the first user asks."""

import os

import typer

from kvshare.cli import traffic_options as options
from kvshare.cli.options import OutputFormat, checked_url
from kvshare.cli.output import ExitCode, is_quiet, note, show


def warm(
    files: options.WarmFiles,
    url: options.WarmUrl = None,
    key: options.WarmKey = None,
    pin: options.WarmPin = False,
    admin_key: options.AdminKey = None,
    admin_url: options.AdminUrl = None,
    concurrency: options.AtATime = 4,
    as_json: options.WarmJson = False,
) -> None:
    """
    Compute documents and prompts ahead and store them, for all users of a key.

    A document is sent as a chat with one message. Later prompts that contain it copy its KV. If these have a
    fixed system prompt and heading before it, give it as a line of JSON with the same ones: more is copied
    then, and answers deviate less. Each line is sent unchanged, except that the answer has one token and only
    equal prefixes are shared, so that the stored KV is exact; its own "kvshare" takes precedence.
    """
    from rich.console import Console

    from kvshare.warming.client import WarmOptions
    from kvshare.warming.entries import read_entries
    from kvshare.warming.run import warm

    url = checked_url(url or os.environ.get("KVSHARE_URL"), "--url")
    if admin_url is not None:
        checked_url(admin_url, "--admin-url")
    chosen = WarmOptions(url, key, admin_url, admin_key, concurrency=concurrency, pin=pin)
    with Console(stderr=True, quiet=is_quiet()).status("reading") as status:
        document = warm(read_entries(files), chosen, lambda done: status.update(f"{done:,} finished"))
    show("warm", document, OutputFormat.JSON if as_json else OutputFormat.TERMINAL)
    if document["stored"] is None:
        note("only an admin key may ask what was stored: --admin-key or KVSHARE_ADMIN_KEY")
    if document["evicted"]:
        note(f"{document['evicted']:,} of them were evicted since: the memory for KV is too small for all")
    if not document["complete"]:
        note("interrupted: only what was finished is counted")
        raise typer.Exit(ExitCode.INTERRUPTED)
    if document["failed"]:
        raise typer.Exit(ExitCode.FAILED)
