"""Measured costs over restarts: those of this machine and model, from a file that may be anything."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvshare.settings import load_settings
from kvshare.sharing.cost import LOAD, PREFILL, CostModel
from kvshare.sharing.kept_costs import COSTS_FILE, Fingerprint, KeptCosts

HERE = Fingerprint(machine="a CPU, 2 cores", model="tiny, float32", versions="1")
ELSEWHERE = [
    Fingerprint(machine="a GPU", model=HERE.model, versions=HERE.versions),
    Fingerprint(machine=HERE.machine, model="tiny, bfloat16", versions=HERE.versions),
    Fingerprint(machine=HERE.machine, model=HERE.model, versions="2"),
]


def fresh(*, learns: bool = True) -> CostModel:
    settings = load_settings(overrides={"cost.learn": learns})
    return CostModel.from_settings(settings.cost, bytes_per_token=100)


def measured(seconds: float = 0.5) -> CostModel:
    cost = fresh()
    cost.observe_prefill(1000, seconds)
    cost.observe_load(10**6, 0.001)
    return cost


def write(folder: Path, fingerprint: Fingerprint = HERE, seconds: float = 0.5) -> None:
    """As a server that ends."""
    kept = KeptCosts(str(folder), cost := fresh())
    kept.use(fingerprint)
    cost.observe_prefill(1000, seconds)
    cost.observe_load(10**6, 0.001)
    kept.save()


def test_costs_are_known_after_a_restart(tmp_path: Path) -> None:
    """All that follows from what was measured: rates, what is measured, of which machine."""
    write(tmp_path)
    cost = fresh()
    assert KeptCosts(str(tmp_path), cost).use(HERE)
    assert cost.measured == {PREFILL, LOAD}
    assert cost.machine == "a CPU, 2 cores"
    assert cost.rates == measured().rates


def test_rates_that_are_not_learned_are_not_restored(tmp_path: Path) -> None:
    """`cost.learn: false`: always as config.yaml says. What was kept stays for when it is on again."""
    write(tmp_path)
    kept = KeptCosts(str(tmp_path), cost := fresh(learns=False))
    kept.use(HERE)
    kept.save()
    assert cost.rates == fresh().rates
    assert KeptCosts(str(tmp_path), fresh()).use(HERE)


@pytest.mark.parametrize("other", ELSEWHERE)
def test_costs_of_another_machine_model_or_version_are_not_used(other: Fingerprint, tmp_path: Path) -> None:
    """They stay in the file for when it is that one again."""
    write(tmp_path)
    write(tmp_path, other, seconds=5.0)
    for fingerprint, seconds in ((HERE, 0.5), (other, 5.0)):
        cost = fresh()
        assert KeptCosts(str(tmp_path), cost).use(fingerprint)
        assert cost.rates == measured(seconds).rates


def test_a_server_that_gets_another_model_measures_that(tmp_path: Path) -> None:
    """As a vLLM that is restarted with another one: what was measured before is kept, and not used for it."""
    cost = fresh()
    kept = KeptCosts(str(tmp_path), cost)
    assert not kept.use(HERE)
    cost.observe_prefill(1000, 0.5)
    assert not kept.use(ELSEWHERE[1])
    assert cost.measured == set()
    cost.observe_prefill(1000, 5.0)
    assert kept.use(HERE)
    assert cost.rates.full_s(1000) == pytest.approx(0.5, rel=0.01)


def test_the_file_holds_the_machines_and_models_used_last(tmp_path: Path) -> None:
    """Eight of them."""
    models = [Fingerprint(machine="m", model=str(number), versions="1") for number in range(10)]
    for model in models:
        write(tmp_path, model)
    known = [KeptCosts(str(tmp_path), fresh()).use(model) for model in models]
    assert known == [False, False, *[True] * 8]


ROW = ["prefill", [1.0, 1000.0, 5e5, 0.0, 0.0], 0.5]


def file_with(rows: object, **changes: object) -> str:
    entry = {"fingerprint": HERE.model_dump(), "rows": rows}
    return json.dumps({"version": 1, "kept": [entry], **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\x00" * 100,
        '"costs"',
        file_with({"work": [ROW]}, version=2),
        file_with({"work": [ROW]}, more=1),
        file_with({"work": [["prefill", [1.0, 1000.0], 0.5]]}),  # two features in place of five
        file_with({"memory": [["load", [1.0, 2.0, 3.0], 0.5]]}),
        file_with({"work": [["prefill", [0.0] * 5, 0.5]]}),
        file_with({"work": [["prefill", [1.0, -5.0, 0.0, 0.0, 0.0], 0.5]]}),
        file_with({"work": [["prefill", [1.0, float("nan"), 0.0, 0.0, 0.0], 0.5]]}),
        file_with({"work": [["prefill", [1.0, 1e300, 0.0, 0.0, 0.0], 0.5]]}),
        file_with({"work": [["prefill", ROW[1], 0.0]]}),
        file_with({"work": [["prefill", ROW[1], "0.5"]]}),
        file_with({"work": ROW}),
        file_with([ROW]),
    ],
)
def test_a_file_that_is_no_such_is_moved_aside(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning. The server starts, measures, and writes one of its own."""
    (tmp_path / COSTS_FILE).write_text(text)
    kept = KeptCosts(str(tmp_path), cost := fresh())
    assert not kept.use(HERE)
    assert cost.rates == fresh().rates
    assert (tmp_path / f"{COSTS_FILE}.old").read_text() == text
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "measured again" in record.getMessage()
    cost.observe_prefill(1000, 0.5)
    kept.save()
    assert KeptCosts(str(tmp_path), fresh()).use(HERE)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**33)


@pytest.mark.parametrize("make", [a_folder, a_pipe, huge])
def test_what_is_no_file_of_ours_is_not_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe would block the start, a huge file would fill the memory."""
    make(tmp_path / COSTS_FILE)
    assert not KeptCosts(str(tmp_path), fresh()).use(HERE)
    assert not (tmp_path / COSTS_FILE).exists()


def no_permission(*_: Any) -> bytes:
    raise PermissionError(13, "Permission denied")


def test_a_file_that_cannot_be_read_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another user's, and nothing is written over it. Once it can be read, it is gone on with."""
    write(tmp_path)
    before = (tmp_path / COSTS_FILE).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", no_permission)  # as root may read everything
        kept = KeptCosts(str(tmp_path), cost := fresh())
        assert not kept.use(HERE)
        cost.observe_prefill(1000, 9.0)
        kept.save()
        assert "Permission denied" in str(kept.problem)
    assert (tmp_path / COSTS_FILE).read_bytes() == before
    cost.observe_prefill(1000, 9.0)
    kept.save()
    assert kept.problem is None
    assert (tmp_path / COSTS_FILE).read_bytes() != before
    assert not caplog.records


def test_a_file_that_can_be_read_later_is_well_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is measured, so that nothing is written."""
    write(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", no_permission)
        kept = KeptCosts(str(tmp_path), fresh())
        kept.use(HERE)
        kept.save()
        assert "Permission denied" in str(kept.problem)
    kept.save()
    assert kept.problem is None


def test_a_folder_that_cannot_be_written_is_a_problem_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of parts shows and logs it; once it can be written, it is."""
    caplog.set_level(logging.INFO)
    kept = KeptCosts(str(tmp_path / "later"), cost := fresh())
    kept.use(HERE)
    for seconds in (0.5, 0.6):
        cost.observe_prefill(1000, seconds)
        kept.save()
    assert kept.problem == "No such file or directory"
    assert not caplog.records
    (tmp_path / "later").mkdir()
    kept.save()
    assert kept.problem is None
    assert KeptCosts(str(tmp_path / "later"), fresh()).use(HERE)


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    """And nothing before something is measured, or before it is known on what, or without a folder."""
    kept = KeptCosts(str(tmp_path), cost := fresh())
    kept.save()
    cost.observe_prefill(1000, 0.5)
    kept.save()
    KeptCosts(None, measured()).save()
    assert list(tmp_path.iterdir()) == []
    kept.use(HERE)
    kept.save()
    assert list(tmp_path.iterdir()) == []
    cost.observe_prefill(1000, 0.5)
    kept.save()
    assert [path.name for path in tmp_path.iterdir()] == [COSTS_FILE]
    assert (tmp_path / COSTS_FILE).stat().st_mode & 0o777 == 0o600
    written = (tmp_path / COSTS_FILE).stat().st_ino
    kept.save()
    assert (tmp_path / COSTS_FILE).stat().st_ino == written
