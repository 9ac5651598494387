"""
Judges whether the gate's promise is kept on measured plans that the calibration has not seen.

    python lab/scripts/judge_promise.py docs/measured/fidelity/smollm2 --data DATA

docs/measured/promise.json is what it prints. `unseen`: plans of half 1, which nothing was fitted on, by the
calibration that ships for the model, or by `--calibration`. `new`: those of them that were opened
after plans of several donors had got a least dose. `left_out`: plans of half 0, each kind of prompts by a
calibration that was fitted to all others.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from kvshare.served_model import find_model
from kvshare.settings import load_settings
from kvshare.sharing.calibration import ModelCalibration, calibration_of
from kvshare.sharing.prediction import Shape
from kvshare_lab.calibration.arms import shape_again
from kvshare_lab.calibration.judging import judged_plans, judgement
from kvshare_lab.calibration.run import calibrated
from kvshare_lab.fidelity.laboratory import Laboratory
from kvshare_lab.fidelity.rows import Plan, read_plans

_NO_SINGLE_PLANS = ("chain", "log")
_NEW = {"rag": 200, "mosaic": 125}  # the first number of a suite
SETTINGS = load_settings()

Made = list[tuple[Plan, Shape]]


def plans_of(laboratory: Laboratory, rows: Path, half: int) -> Made:
    return [
        (plan, shape)
        for plan in read_plans(rows, half=half, model=laboratory.name)
        if plan.suite not in _NO_SINGLE_PLANS and (shape := shape_again(laboratory, plan)) is not None
    ]


def judged(made: Made, calibration: ModelCalibration) -> dict[str, Any]:
    limit, risk = SETTINGS.sharing.max_deviation, SETTINGS.sharing.max_risk
    return judgement(judged_plans(made, calibration, risk=risk), limit=limit, risk=risk)


def is_new(plan: Plan) -> bool:
    first = _NEW.get(plan.suite)
    return first is not None and plan.row["number"] >= first


def left_out(laboratory: Laboratory, made: Made) -> dict[str, Any]:
    """By suite: how a calibration judges it that was fitted to all others."""
    found = {}
    for suite in sorted({plan.suite for plan, _ in made}):
        calibration = calibrated(laboratory, [each for each in made if each[0].suite != suite])
        found[suite] = judged([each for each in made if each[0].suite == suite], calibration)["all"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--calibration", help="a file of `kvshare calibrate`")
    given = parser.parse_args()
    served = find_model(given.model, download=True)
    laboratory = Laboratory.open(served, SETTINGS, data=given.data, noise=False)
    calibration = calibration_of(laboratory.model.model.fingerprint, given.calibration)
    unseen = plans_of(laboratory, given.rows, 1)
    document = {
        "model": laboratory.name,
        "calibration": {"plans": calibration.measured["plans"], "longest": calibration.longest},
        "unseen": judged(unseen, calibration),
        "new": judged([each for each in unseen if is_new(each[0])], calibration),
        "left_out": left_out(laboratory, plans_of(laboratory, given.rows, 0)),
    }
    text = json.dumps(document, indent=1)
    # What is said of one kind of plans is one line.
    sys.stdout.write(re.sub(r"\{[^{}]*\}", lambda found: " ".join(found.group().split()), text) + "\n")


if __name__ == "__main__":
    main()
