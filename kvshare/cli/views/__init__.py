"""
Views draw documents on a terminal. They ask and compute nothing.

A view is a function from a document to what is shown of it: lines and tables, below each other.
"""

from collections.abc import Callable, Mapping

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from kvshare.cli.views import explanation, prompts, replays, requests, server, tenants
from kvshare.cli.views.parts import Document, Parts

_WIDTH_OFF_TERMINAL = 140

_NAMED = (
    *(server.ready, server.version, server.key, server.settings, server.doctor, server.verify, server.warm),
    *(prompts.stats, prompts.tiers, prompts.store_verify, prompts.store_gc, prompts.tree, prompts.node),
    *(prompts.diff, prompts.evict, prompts.pin, prompts.unpin, explanation.explain),
    *(requests.requests, requests.request),
    *(tenants.config, tenants.config_valid, tenants.reloaded, tenants.usage, tenants.top, tenants.tenants),
)
View = Callable[[Document], Parts]
VIEWS: Mapping[str, View] = {
    **{view.__name__: view for view in _NAMED},
    "replay": replays.replay,
    "replay-diff": replays.diff,
    "replay-live": replays.live,
    "replay-paper": replays.paper,
    "replay-tiers": replays.tiers,
}


def draw(view: str | View, document: Document, *, width: int | None = None) -> None:
    """
    Write the document to stdout; colours only on a terminal and without NO_COLOR.

    `view`: the name of one of VIEWS, or a view
    `width`: columns; None is the terminal's, which is at least 80.
    """
    console = Console(highlight=False)
    if width is not None or not console.is_terminal:
        console.width = width or _WIDTH_OFF_TERMINAL

    def lines(part: RenderableType) -> str:
        with console.capture() as captured:
            console.print(Text(part) if isinstance(part, str) else part)
        return captured.get().removesuffix("\n")

    drawn = VIEWS[view] if isinstance(view, str) else view
    text = "\n".join(lines(part) for part in drawn(document))
    for line in lines(Text.from_ansi(text.rstrip("\n"))).splitlines():
        typer.echo(line.rstrip())
