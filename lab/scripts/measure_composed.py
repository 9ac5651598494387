"""
Measures plans of several donors of half 1 that a calibration would share, for lab/scripts/judge_promise.py.

    kvshare calibrate --rows docs/measured/fidelity/smollm2 --data DATA --out X --minutes 0.01
    python lab/scripts/measure_composed.py X --data DATA --out docs/measured/fidelity/smollm2 --minutes 60

Plans that the calibration refuses tell nothing of its promise, and are not measured. Two suites take turns;
`--part 0/2` and `--part 1/2` share the work of two processes. Prints numbers, and no deviation: who judges
looks at the rows once, when there are enough.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch

from kvshare.served_model import find_model
from kvshare.settings import load_settings
from kvshare.sharing.calibration import ModelCalibration, read_calibration
from kvshare.sharing.prediction import Shape
from kvshare_lab.calibration.arms import shape_of_scenario
from kvshare_lab.fidelity.laboratory import Laboratory
from kvshare_lab.fidelity.rows import Shards, Stage, Task

FIRST = {"rag": 200, "mosaic": 125}  # those before were opened when the gate was chosen
SHARES = (0.35, 0.5)  # of the prompt, repaired
_STAGES: dict[tuple[float, ...], Stage] = {
    shares: Stage(name=name, half=1, plans={}, rules=("kvshare",), budgets=shares)
    for name, shares in (("unseen", SHARES), ("half", SHARES[-1:]))
}
_NEARLY = 1.01  # measured arms repair a few tokens more or fewer than their share
SETTINGS = load_settings()


def wanted(shape: Shape, calibration: ModelCalibration) -> tuple[float, ...]:
    """The shares to measure: those that the gate passes by the typical deviation, and the largest."""
    own = calibration.composed["attention"]
    limits = own.risks["composed"].typical[SETTINGS.sharing.max_risk]
    most = _NEARLY * limits[SETTINGS.sharing.max_deviation]
    typical = own.typical(shape.repaired([share * shape.num_tokens for share in SHARES])).tolist()
    passing = [share for share, each in zip(SHARES, typical, strict=True) if each <= most]
    return SHARES if len(passing) == len(SHARES) else SHARES[-1:] if passing else ()


def tasks(laboratory: Laboratory, calibration: ModelCalibration) -> Iterator[Task]:
    """What to measure, without end."""
    for step in count():
        for suite, first in FIRST.items():
            scenario = laboratory.scenario(suite, 1, first + step)
            shape = None if scenario is None else shape_of_scenario(laboratory, scenario)
            if shape is not None and shape.regime == "composed" and (shares := wanted(shape, calibration)):
                yield Task(_STAGES[shares], suite, first + step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    end, (part, parts) = time.monotonic() + 60 * given.minutes, map(int, given.part.split("/"))
    served = find_model("default", download=True)
    laboratory = Laboratory.open(served, SETTINGS, data=given.data, noise=False)
    shards = Shards(given.out, part, parts)
    for task in tasks(laboratory, read_calibration(given.calibration)):
        if time.monotonic() > end:
            break
        is_done = any(shards.has(task._replace(stage=stage)) for stage in _STAGES.values())
        if task.number % parts == part and not is_done:
            shards.add(task, laboratory.measure(task))
            sys.stdout.write(f"{task.suite} {task.number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
