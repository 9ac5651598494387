"""`kvshare store verify` and `kvshare store gc`: the KV that a store has on disk."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kvshare.cli.options import Config, CountOnly, Format, OutputFormat, Store
from kvshare.cli.output import ExitCode, show
from kvshare.cli.store import stopped_store

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check or clean the KV on disk.")


@app.command("verify")
def verify(store: Store = None, config: Config = None, output_format: Format = OutputFormat.TERMINAL) -> None:
    """Read all KV on disk, and compare it with its checks. A server may run meanwhile."""
    found = stopped_store(store, config).verify()
    show("store_verify", asdict(found), output_format)
    if found.damaged:
        raise typer.Exit(ExitCode.FAILED)


@app.command("gc")
def gc(
    store: Store = None,
    config: Config = None,
    dry_run: CountOnly = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Delete KV on disk that belongs to no stored prompt. A server does that, too, once it has started."""
    show("store_gc", asdict(stopped_store(store, config).collect(dry_run=dry_run)), output_format)
