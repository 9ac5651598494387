"""`kvshare calibrate`: what reused KV costs a model, measured once, in a file that servers read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import note, show
from kvshare.extras import require

_OUT, _ROWS = Path("calibration.json"), Path("calibration")


def calibrate(
    model: Annotated[str, typer.Option(help="A folder, a Hugging Face name, default or demo.")] = "default",
    out: Annotated[Path, typer.Option(help="The file to write, for sharing.calibration.")] = _OUT,
    log: Annotated[Path | None, typer.Option(help="Requests of your own, as replay reads them.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data sets. [default: the project's own samples]")] = None,
    suites: Annotated[str | None, typer.Option(help="Kinds of prompts, with commas. [default: all]")] = None,
    rows: Annotated[Path, typer.Option(help="What is measured; a lab's rows are taken as they are.")] = _ROWS,
    plans: Annotated[int, typer.Option(min=1, help="Measured of each suite.")] = 12,
    minutes: Annotated[float, typer.Option(min=0, help="Stop then; the next run goes on.")] = 24 * 60,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Measure what reused KV costs a model, and write what the server needs to know of it."""
    require("bench", what="`kvshare calibrate`")
    from kvshare.bench import calibrate as calibration

    document = calibration.run(
        model=model, rows=rows, data=data, log=log, suites=suites, plans=plans, minutes=minutes, out=out
    )
    show("bench", document, output_format)
    note(f"written: set sharing.calibration to {out}")
