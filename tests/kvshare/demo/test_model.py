"""The bundled demo model: it loads like any Hugging Face model, and it answers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from evaluate_demo_model import evaluate
from kvshare.demo import MODEL_PATH

MAX_BYTES = 30 * 2**20
FLOOR = 0.93
"""Below the measured accuracy by more than chance on so few questions explains."""


def test_weights_are_small_enough_to_ship() -> None:
    """The weights stay under 30 MB."""
    assert (MODEL_PATH / "model.safetensors").stat().st_size <= MAX_BYTES


@pytest.mark.model
def test_loads_as_a_llama_of_two_to_fifteen_million_parameters() -> None:
    """The folder names its own architecture."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 2e6 <= model.num_parameters() <= 15e6


@pytest.mark.model
def test_answers_held_out_questions() -> None:
    """The model reads values from forms it has never seen."""
    found = evaluate(MODEL_PATH, 44, seed=2)
    assert found["num_questions"] == 44
    assert found["accuracy"] >= FLOOR


def test_recorded_figures_are_those_of_a_real_evaluation() -> None:
    """The recorded evaluation names its command and covers every kind and number of records."""
    recorded = json.loads((MODEL_PATH / "evaluation.json").read_text())
    assert recorded["command"].startswith("python lab/scripts/evaluate_demo_model.py")
    assert set(recorded["by_kind"]) == {"lookup", "compare", "derived"}
    assert set(recorded["by_records"]) == {"1", "2", "3", "4"}
    assert recorded["accuracy"] >= FLOOR


@pytest.mark.model
def test_an_evaluation_needs_questions() -> None:
    """An evaluation of nothing is an error, not a perfect score."""
    with pytest.raises(ValueError, match="empty"):
        evaluate(MODEL_PATH, 0)
