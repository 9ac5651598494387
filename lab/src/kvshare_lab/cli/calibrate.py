"""`kvshare calibrate`: measures what reused KV costs a model, and writes what the server needs to know."""

from pathlib import Path
from typing import Any

import typer

from kvshare.cli.options import Format, OutputFormat, described, with_options
from kvshare.cli.output import note, show
from kvshare.sharing.calibration import ModelCalibration

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("calibrate")
@with_options("calibrate", described(Path(__file__).with_suffix(".toml")))
def calibrate(*, output_format: Format = OutputFormat.TERMINAL, **options: Any) -> None:
    """Measure what reused KV costs a model, and write what the server needs to know of it."""
    from kvshare_lab.calibration.risks import promises
    from kvshare_lab.calibration.run import run

    found = run(**options)
    show("bench", {"benchmark": "calibrate", **found}, output_format)
    calibration = ModelCalibration.from_document(found["calibration"])
    for rule, each in calibration.rules.items():
        for line in promises(each.risks):
            note(f"certified at a risk of 2 %, repaired by {rule}: {line}")
    note(f"it holds for prompts of up to {calibration.longest} tokens")
    note(f"written: set sharing.calibration to {options['out']}")
