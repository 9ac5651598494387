"""
Views draw documents on a terminal. They ask and compute nothing.

A view is a function from a document to what is shown of it: lines and tables, below each other.
"""

from collections.abc import Callable, Mapping

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from kvshare.cli.views import benchmarks, explanation, prompts, replays, requests, server, tenants
from kvshare.cli.views.parts import Document, Parts

_WIDTH_OFF_TERMINAL = 140

_NAMED = (
    *(server.ready, server.version, server.key, server.settings, server.doctor, server.verify, server.warm),
    *(prompts.stats, prompts.tiers, prompts.store_verify, prompts.store_gc, prompts.tree, prompts.node),
    *(prompts.diff, prompts.evict, prompts.pin, prompts.unpin, explanation.explain, benchmarks.bench),
    *(requests.requests, requests.request),
    *(tenants.config, tenants.config_valid, tenants.reloaded, tenants.usage, tenants.top, tenants.tenants),
)
VIEWS: Mapping[str, Callable[[Document], Parts]] = {
    **{view.__name__: view for view in _NAMED},
    "replay": replays.replay,
    "replay-diff": replays.diff,
    "replay-live": replays.live,
    "replay-paper": replays.paper,
    "replay-tiers": replays.tiers,
}


def draw(view: str, document: Document, *, width: int | None = None) -> None:
    """
    Write the document to stdout; colours only on a terminal and without NO_COLOR.

    `view`: one of VIEWS
    `width`: columns; None is the terminal's, which is at least 80.
    """
    console = Console(highlight=False)
    if width is not None or not console.is_terminal:
        console.width = width or _WIDTH_OFF_TERMINAL

    def lines(part: RenderableType) -> str:
        with console.capture() as captured:
            console.print(Text(part) if isinstance(part, str) else part)
        return captured.get().removesuffix("\n")

    text = "\n".join(lines(part) for part in VIEWS[view](document))
    for line in lines(Text.from_ansi(text.rstrip("\n"))).splitlines():
        typer.echo(line.rstrip())
