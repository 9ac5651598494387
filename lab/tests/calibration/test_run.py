"""The calibration from measured plans: it tells apart what differs, and says how well on unseen ones."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvshare.errors import ConfigError, LogError
from kvshare.sharing.calibration import calibration_of, read_calibration
from kvshare.sharing.prediction import FEATURES, Shape
from kvshare.sharing.risk import ANY_DEVIATION
from kvshare_lab.calibration.arms import Measured
from kvshare_lab.calibration.evaluation import evaluated
from kvshare_lab.calibration.risks import FEWEST_PLANS
from kvshare_lab.calibration.run import calibrated, run
from kvshare_lab.fidelity.laboratory import Laboratory
from kvshare_lab.fidelity.rows import Plan, Setting
from kvshare_lab.fidelity.suites.logs import similar_requests


def measured(noise: float) -> Measured:
    """Three suites of twenty sources with five arms each; KL rises with the first feature."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, len(FEATURES)))
    kl = 10 ** (-3 + 0.7 * values[:, 0] + noise * rng.normal(size=300))
    suites = np.repeat(["agent", "rag", "window"], 100)
    sources = np.array([f"{suite}-{number // 5}" for number, suite in enumerate(suites)])
    regimes, plans = np.repeat(["moved"], 300), np.arange(300) // 5
    repaired, lengths = 10 * values[:, -1], np.full(300, 600)
    return Measured(values, kl, suites, sources, regimes, plans, repaired, lengths)


def test_what_can_be_told_is_told() -> None:
    found = evaluated(measured(noise=0.05))
    assert found["explained"]["other_sources"] > 0.95
    assert found["explained"]["other_suites"] > 0.95
    assert found["suites"]["rag"]["arms"] == 100
    assert found["suites"]["rag"]["predicted"] == pytest.approx(found["suites"]["rag"]["measured"], rel=0.2)
    assert sum(part["arms"] for part in found["means"]) == (measured(noise=0.05).values[:, -1] > 0).sum()
    for part in found["means"]:
        assert part["from"] <= part["expected"] < part["to"]
        if part["arms"] >= 20:
            assert part["found"] == pytest.approx(part["expected"], rel=0.3)


def test_what_is_noise_is_not_explained() -> None:
    """Held-out plans see to that: a fit on noise explains none of it."""
    made = measured(noise=0.05)
    shuffled = np.random.default_rng(2).permutation(made.kl)
    found = evaluated(replace(made, kl=shuffled))
    assert found["explained"]["other_sources"] < 0.05


@pytest.mark.parametrize(
    ("plans", "rules"), [(FEWEST_PLANS - 1, set()), (FEWEST_PLANS, {"windows", "attention"})]
)
def test_plans_of_several_donors_get_their_own_weights_if_enough_were_repaired(
    plans: int, rules: set[str]
) -> None:
    rng = np.random.default_rng(3)
    made = [(plan_of(number, rng), shape_of_donors(2, rng)) for number in range(plans)]
    model = SimpleNamespace(model=SimpleNamespace(fingerprint="f"))
    found = calibrated(cast(Laboratory, SimpleNamespace(name="m", model=model)), made)
    assert set(found.composed) == rules


def test_plans_of_several_donors_are_certified_where_half_is_repaired() -> None:
    """Every plan deviates by .06 nats with .35 repaired, and by hardly anything with .5."""
    rng = np.random.default_rng(4)
    some, half = (Setting("kvshare", "b", share) for share in (0.35, 0.5))
    made = []
    for number in range(2 * FEWEST_PLANS):
        plan, kl = plan_of(number, rng), 0.001 * float(rng.uniform(0.9, 1))
        arms = {**plan.arms, some: {"b": 0.35, "kl": 0.06}, half: {"b": 0.5, "kl": kl}}
        made.append((replace(plan, arms=arms), shape_of_donors(2, rng)))
    model = SimpleNamespace(model=SimpleNamespace(fingerprint="f"))
    found = calibrated(cast(Laboratory, SimpleNamespace(name="m", model=model)), made)
    own = found.composed["attention"]
    assert own.least_repaired == 0.5
    assert own.risks["composed"].bound(0.001, 0.02) <= 0.002
    shape = made[0][1]
    assert found.bound(shape, "attention", 0.35 * 800, risk=0.02) == ANY_DEVIATION
    assert found.bound(shape, "attention", 0.5 * 800, risk=0.02) <= 0.002
    assert found.rules["attention"].least_repaired == 0


def plan_of(number: int, rng: np.random.Generator) -> Plan:
    """A plan that was measured without repairs, and with both kinds of them."""
    arms = {
        Setting(rule, "b", share): {"b": share, "kl": float(10 ** rng.normal(-3, 0.5))}
        for rule, share in (("placeholders", 0.0), ("default", 0.1), ("kvshare", 0.5))
    }
    return Plan("rag", f"source-{number}", {"tokens": 800}, arms)


def shape_of_donors(count: int, rng: np.random.Generator) -> Shape:
    values = rng.normal(size=len(FEATURES) - 1)
    values[FEATURES.index("donors")] = np.log(count)
    return Shape(tuple(values.tolist()), stale=100.0, far=1.0, num_tokens=800)


@pytest.mark.long
def test_a_model_is_measured_and_the_file_is_read(tmp_path: Path) -> None:
    """The forms model, end to end: plans of the project's own samples and of a log, a file, and its use."""
    log, out = tmp_path / "log.jsonl", tmp_path / "own.json"
    lines = [f"Line {number}: the value of field {number} is {number * 7} units." for number in range(40)]
    with log.open("w") as file:
        for changed in range(12):
            said = "\n".join([*lines[:changed], f"Something else, {changed}.", *lines[changed + 1 :]])
            file.write(json.dumps({"messages": [{"role": "user", "content": said}]}) + "\n")
    found = run(model="demo", rows=tmp_path / "rows", plans=1, log=log, out=out)
    assert found["rules"]["windows"]["arms"] >= 100
    assert "log" in found["calibration"]["measured"]["suites"]
    own = read_calibration(out)
    assert own.caution == 1
    assert calibration_of(own.fingerprint, str(out)) == own
    assert calibration_of("another", str(out)) == own  # whoever names it means it
    again = run(model="demo", rows=tmp_path / "rows", plans=1, log=log, out=out)  # nothing is left to measure
    assert again["calibration"] == found["calibration"]


def test_a_logs_pairs_share_words_and_are_no_mere_continuations(tmp_path: Path) -> None:
    """The third request edits the first; the second only goes on where it ended."""
    history = [{"role": "user", "content": " ".join(f"word{number}" for number in range(60))}]
    answered = [*history, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    edited = [{"role": "user", "content": history[0]["content"].replace("word30", "other")}]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (history, answered, edited)))
    (draft,) = similar_requests(path)
    assert list(draft.prompt) == edited
    assert list(map(list, draft.stored)) == [history, answered]


def test_too_few_plans_are_refused(tmp_path: Path) -> None:
    row = {
        "suite": "rag",
        "half": 0,
        "number": 0,
        "model": "kvshare-demo",
        "source": "s",
        "labels": {},
        "tokens": 300,
        "arms": [{"rule": "kvshare", "by": "b", "budget": 0.1, "kl": 0.01}],
    }
    (tmp_path / "of-another-stage").mkdir()
    (tmp_path / "of-another-stage" / "rag.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(LogError, match=r"measured arms for windows, expected 100 or more"):
        run(model="demo", rows=tmp_path)


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        run(model="demo", rows=tmp_path, out=tmp_path / "none" / "own.json")
