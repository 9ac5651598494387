"""What the embedded engine measures before its first request, and keeps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshare.embedded import start_measurement
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.start_measurement import fingerprint_of, measure
from kvshare.settings import load_settings
from kvshare.sharing.cost import LOAD, PREFILL, CostModel
from kvshare.sharing.kept_costs import COSTS_FILE
from kvshare_lab.bench.random_models import tiny_model
from tests.kvshare.embedded.tiny_engine import engine_at, prompt, stored

MEASURING: dict[str, Any] = {"cost.measure_at_start": True, "cost.learn": True}


@pytest.fixture(scope="module")
def model() -> EmbeddedModel:
    return EmbeddedModel(tiny_model("llama"), name="tiny")


def fresh(model: EmbeddedModel, *, learns: bool = True) -> CostModel:
    settings = load_settings(overrides={"cost.learn": learns}).cost
    return CostModel.from_settings(settings, bytes_per_token=model.layout.bytes_per_token)


def lengths(cost: CostModel, kind: str) -> list[float]:
    """The computed tokens, or the loaded bytes, of the observations of a kind."""
    return [features[1] for rows in cost.rows().values() for each, features, _ in rows if each == kind]


def test_prefills_loads_and_passes_are_measured(model: EmbeddedModel) -> None:
    """Three lengths up to a chunk; two loads; passes behind the longest context there is."""
    cost = fresh(model)
    measure(model, cost, chunk_tokens=256, is_stopping=lambda: False)
    longest = model.max_model_len
    assert lengths(cost, PREFILL) == [16, 64, 256]
    assert lengths(cost, LOAD) == [256 * cost.rates.bytes_per_token, longest * cost.rates.bytes_per_token]
    assert lengths(cost, "prefix") == [16, 256]
    behind = [features for kind, features, _ in cost.rows()["work"] if kind == "prefix"]
    assert [features[1] + features[4] for features in behind] == [longest, longest]
    assert {PREFILL, LOAD} <= cost.measured


@pytest.mark.parametrize("name", ["mistral-window", "deepseek-v2", "llama4", "gpt-oss"])
def test_any_kind_of_model_can_be_measured(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With windows, latent attention, chunks and sinks."""
    of_kind = EmbeddedModel(tiny_model(name), name=name)
    measure(of_kind, cost := fresh(of_kind), chunk_tokens=64, is_stopping=lambda: False)
    assert cost.measured == {PREFILL, LOAD}
    assert "could not be measured" not in caplog.text


@pytest.mark.parametrize("chunk_tokens", [1, 7, 100_000])
def test_any_chunk_can_be_measured(chunk_tokens: int, model: EmbeddedModel) -> None:
    """No chunk is longer than the context of the model."""
    cost = fresh(model)
    measure(model, cost, chunk_tokens=chunk_tokens, is_stopping=lambda: False)
    assert max(lengths(cost, PREFILL)) == min(chunk_tokens, model.max_model_len)


def test_a_long_prefill_is_the_last_one(model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine the start does not wait for the longest chunk, nor for one behind a context."""
    monkeypatch.setattr(start_measurement, "_LONG_S", 0.0)
    cost = fresh(model)
    measure(model, cost, chunk_tokens=256, is_stopping=lambda: False)
    assert lengths(cost, PREFILL) == [16]
    assert lengths(cost, "prefix") == [16]


def test_a_server_that_stops_measures_no_more(model: EmbeddedModel) -> None:
    """It waits for the pass in progress only."""
    cost = fresh(model)
    measure(model, cost, chunk_tokens=256, is_stopping=lambda: True)
    assert lengths(cost, PREFILL) == [16]
    assert not lengths(cost, LOAD)


def test_rates_that_are_not_learned_are_not_measured(model: EmbeddedModel) -> None:
    """`cost.learn: false`: always as config.yaml says."""
    cost = fresh(model, learns=False)
    measure(model, cost, chunk_tokens=256, is_stopping=lambda: False)
    assert not any(cost.rows().values())


def test_a_failure_is_logged_and_no_more(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the device has no memory for a long context: the server starts, and learns."""

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("8 GiB")

    monkeypatch.setattr(start_measurement, "_measure_reuse", lambda *_, **__: refuse())
    measure(model, cost := fresh(model), chunk_tokens=64, is_stopping=lambda: False)
    assert cost.measured == {PREFILL}
    assert "could not be measured" in caplog.text


async def test_a_start_measures_and_the_next_one_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What requests taught meanwhile is kept, too. Measuring leaves nothing stored and no use counted."""
    caplog.set_level(logging.INFO)
    engine = engine_at(tmp_path, **MEASURING)
    await engine.start()
    status, costs = engine.status(), engine.sharing.costs()
    assert (status.num_nodes, status.num_segments, status.kv_bytes) == (0, 0, 0)
    assert costs["measured"] == ["load", "prefill"]
    assert costs["machine"]
    await stored(engine, prompt(200))
    rows = engine.sharing.cost.rows()
    await engine.stop()
    assert caplog.text.count("measured in") == 1
    again = engine_at(tmp_path, **MEASURING)
    await again.start()
    assert again.sharing.cost.rows() == rows
    await again.stop()
    assert caplog.text.count("measured in") == 1


def test_costs_are_those_of_a_machine_a_model_and_the_versions(model: EmbeddedModel) -> None:
    """Another number of threads or another kind of model computes at another speed."""
    here = fingerprint_of(model)
    assert fingerprint_of(EmbeddedModel(tiny_model("llama"), name="tiny")) == here
    assert fingerprint_of(EmbeddedModel(tiny_model("qwen2"), name="tiny")).model != here.model
    halved = EmbeddedModel(tiny_model("llama", dtype=torch.bfloat16), name="tiny")
    assert fingerprint_of(halved).model != here.model
    assert f"torch {torch.__version__}" in here.versions
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        assert fingerprint_of(model).machine != here.machine
    finally:
        torch.set_num_threads(num_threads)


async def test_nothing_is_measured_where_that_is_off(tmp_path: Path) -> None:
    """Nor is a file written before a request is served."""
    engine: EmbeddedEngine = engine_at(tmp_path, **{**MEASURING, "cost.measure_at_start": False})
    await engine.start()
    assert engine.sharing.cost.measured == set()
    await engine.stop()
    assert not (tmp_path / COSTS_FILE).exists()
