"""`kvshare calibrate`: measures what reused KV costs a model, and writes what the server needs to know."""

from pathlib import Path
from typing import Any

import typer

from kvshare.cli.options import Format, OutputFormat, described, with_options
from kvshare.cli.output import note, show

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("calibrate")
@with_options("calibrate", described(Path(__file__).with_suffix(".toml")))
def calibrate(*, output_format: Format = OutputFormat.TERMINAL, **options: Any) -> None:
    """Measure what reused KV costs a model, and write what the server needs to know of it."""
    from kvshare_lab.calibration.run import run

    show("bench", run(**options), output_format)
    note(f"written: set sharing.calibration to {options['out']}")
