"""`kvshare workload NAME`: streams in which sharing pays, as JSON lines for replay, bench and load tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvshare.cli.output import note

# As in `kvshare.replay.workloads.WORKLOADS`; named here so that --help need not import it.
WorkloadName = Literal["template", "header", "window", "resubmit", "rag", "agent", "revise"]

Out = Annotated[
    Path, typer.Option("--out", "-o", help="JSON lines; compressed if it ends with .gz; - is stdout.")
]
Sources = Annotated[
    list[Path] | None,
    typer.Option("--source", help="A file to take the text from; may be repeated. [default: a small sample]"),
]


def workload(
    name: Annotated[WorkloadName, typer.Argument(help="What kind of traffic.")],
    out: Out,
    source: Sources = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="At most so many.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds and sources give equal files.")] = 0,
) -> None:
    """
    Write a stream of requests in which sharing pays.

    template: forms with other values in their slots. header: date, user and tools on top of a long system
    prompt. window: chats whose oldest turns are dropped. resubmit: earlier turns edited. rag: documents in
    another order, beside others. agent: tool transcripts with changed results. revise: a text changed in one
    place and asked about again, forty times.
    """
    from kvshare.replay.workloads import generate, write_rows

    rows = generate(name, source or (), num_requests=requests, seed=seed)
    try:
        number = write_rows(rows, out)
    except OSError as exc:
        raise typer.BadParameter(f"cannot be written: {exc.strerror}", param_hint="--out") from exc
    note(f"{number} requests -> {out}")
