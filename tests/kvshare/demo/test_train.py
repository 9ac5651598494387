"""The training run: its head start, its learning rate, its checkpoints."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvshare.demo import MODEL_PATH
from kvshare.demo.architecture import build_model
from kvshare.demo.batches import next_batch
from kvshare.demo.curriculum import STAGES
from kvshare.demo.tokenizer import load_tokenizer
from kvshare.demo.train import PEAK_RATE, Progress, Run, answer_losses, rate_at


def test_an_untrained_model_already_copies() -> None:
    """The head start finds an earlier run of tokens far better than chance."""
    torch.manual_seed(1)
    tokenizer = load_tokenizer(MODEL_PATH)
    batch = next_batch(random.Random(1), tokenizer, STAGES[0])
    with torch.no_grad():
        _, _, right = answer_losses(build_model(tokenizer), batch)
    assert right.float().mean() > 0.2


@pytest.mark.parametrize(("step", "minutes", "share"), [(0, 0.0, 0.02), (500, 5.0, 1.0), (500, 100.0, 0.0)])
def test_learning_rate_warms_up_and_falls(step: int, minutes: float, share: float) -> None:
    """It begins low, stays flat, and has fallen to nothing when the time is up."""
    progress = Progress(step=step, seconds=60 * minutes)
    assert rate_at(progress, minutes=100.0) == pytest.approx(share * PEAK_RATE)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """A second start continues the steps of the first and leaves a model that loads."""
    load_tokenizer(MODEL_PATH).save_pretrained(tmp_path)  # found there, so not trained again
    Run(tmp_path, minutes=0.01, seed=3).train()
    first = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]
    Run(tmp_path, minutes=first["seconds"] / 60 + 0.01, seed=3).train()
    second = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]
    assert 0 < first["step"] < second["step"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 2e6
