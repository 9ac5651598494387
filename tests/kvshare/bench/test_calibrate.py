"""The calibration from measured plans: it tells apart what differs, and says how well on unseen ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvshare.bench.calibrate import Shapes, evaluated, run
from kvshare.errors import LogError
from kvshare.sharing.prediction import FEATURES


def shapes(noise: float) -> Shapes:
    """Three suites of twenty sources with five plans each; KL rises with the first feature."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, len(FEATURES)))
    kl = 10 ** (-3 + 0.7 * values[:, 0] + noise * rng.normal(size=300))
    suites = np.repeat(["agent", "rag", "window"], 100)
    sources = np.array([f"{suite}-{number // 5}" for number, suite in enumerate(suites)])
    return Shapes(values, kl, suites, sources, "m")


def test_what_can_be_told_is_told() -> None:
    found = evaluated(shapes(noise=0.05), rule="kvshare")
    assert found["explained"]["other_sources"] > 0.95
    assert found["explained"]["other_suites"] > 0.95
    assert found["suites"]["rag"]["plans"] == 100
    assert found["suites"]["rag"]["predicted"] == pytest.approx(found["suites"]["rag"]["measured"], rel=0.2)
    assert found["calibration"]["features"]["lost"]["weight"] == pytest.approx(0.7, abs=0.05)


def test_what_is_noise_is_not_explained() -> None:
    """Held-out plans see to that: a fit on noise explains none of it."""
    made = shapes(noise=0.05)
    shuffled = np.random.default_rng(2).permutation(made.kl)
    found = evaluated(Shapes(made.values, shuffled, made.suites, made.sources, "m"), rule="kvshare")
    assert found["explained"]["other_sources"] < 0.05


def test_too_few_plans_are_refused(tmp_path: Path) -> None:
    row = {
        "suite": "rag",
        "half": 0,
        "number": 0,
        "model": "m",
        "source": "s",
        "labels": {},
        "tokens": 300,
        "arms": [{"rule": "kvshare", "by": "b", "budget": 0.1, "kl": 0.01}],
    }
    (tmp_path / "rag.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(LogError, match=r"1 plans with kvshare at 0\.1, expected 50 or more"):
        run(rows=tmp_path)
