"""`kvshare calibrate`: measures what reused KV costs a model, and writes what the server needs to know."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import note, show
from kvshare.sharing.calibration import ModelCalibration
from kvshare_lab.cli import view

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("calibrate")
def calibrate(
    model: Annotated[str, Option(help="A folder, a Hugging Face name, default or demo.")] = "default",
    out: Annotated[Path, Option(help="The file to write, for sharing.calibration.")] = Path(
        "calibration.json"
    ),
    log: Annotated[Path | None, Option(help="Requests of your own, as replay reads them.")] = None,
    data: Annotated[Path | None, Option(help="Data sets. [default: the project's own samples]")] = None,
    suites: Annotated[str | None, Option(help="Kinds of prompts, with commas. [default: all]")] = None,
    rows: Annotated[Path, Option(help="What is measured; a lab's rows are taken as they are.")] = Path(
        "calibration"
    ),
    plans: Annotated[int, Option(min=1, help="Measured of each suite.")] = 12,
    minutes: Annotated[float, Option(min=0, help="Stop then; the next run goes on.")] = 1440,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Measure what reused KV costs a model, and write what the server needs to know of it."""
    from kvshare_lab.calibration.risks import promises
    from kvshare_lab.calibration.run import run

    found = run(
        model=model, rows=rows, data=data, log=log, suites=suites, plans=plans, minutes=minutes, out=out
    )
    show(view.bench, {"benchmark": "calibrate", **found}, output_format)
    calibration = ModelCalibration.from_document(found["calibration"])
    for rule, each in calibration.rules.items():
        composed = calibration.composed.get(rule, each)
        for line in promises({**each.risks, "composed": composed.risks["composed"]}):
            note(f"certified at a risk of 2 %, repaired by {rule}: {line}")
    note(f"it holds for prompts of up to {calibration.longest} tokens")
    note(f"written: set sharing.calibration to {out}")
