"""The training run: its head start, its learning rate, the model that it leaves."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from demo_curriculum import STAGES, next_batch
from kvshare.demo import MODEL_PATH
from train_demo_model import PEAK_RATE, answer_losses, build_model, rate_at, train


def test_an_untrained_model_already_copies() -> None:
    """The head start finds an earlier run of tokens far better than chance."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    batch = next_batch(random.Random(1), tokenizer, STAGES[0])
    with torch.no_grad():
        _, _, right = answer_losses(build_model(), batch)
    assert right.float().mean() > 0.2


@pytest.mark.parametrize(("step", "share_left", "share"), [(0, 1.0, 0.02), (500, 0.95, 1.0), (500, 0.0, 0.0)])
def test_learning_rate_warms_up_and_falls(step: int, share_left: float, share: float) -> None:
    """It begins low, stays flat, and has fallen to nothing when the time is up."""
    assert rate_at(step, share_left=share_left) == pytest.approx(share * PEAK_RATE)


def test_a_run_leaves_a_model_that_loads(tmp_path: Path) -> None:
    """After a step or two there are weights, tokenizer and log."""
    train(tmp_path, minutes=0.01, seed=3)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 2e6
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 1536
    assert (tmp_path / "training_log.jsonl").read_text().startswith('{"step": 0, "stage": 0')
