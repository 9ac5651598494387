"""The demo model with wider heads is the same function."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from kvshare.demo import MODEL_PATH
from kvshare_lab.demo_model.export import export, widened

pytestmark = pytest.mark.model


def test_wider_heads_compute_the_same_logits(tmp_path: Path) -> None:
    """Exported and loaded again, logits agree with the shipped model's to rounding."""
    folder = export(tmp_path / "wide")
    shipped = LlamaForCausalLM.from_pretrained(MODEL_PATH)
    wide = LlamaForCausalLM.from_pretrained(folder)
    token_ids = torch.randint(3, 1500, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, got = shipped(token_ids).logits, wide(token_ids).logits
    assert wide.config.head_dim == 64
    assert (expected - got).abs().max() < 1e-3 * expected.abs().max()


def test_narrower_heads_are_refused() -> None:
    """Nothing can be left out of a head."""
    with pytest.raises(ValueError, match="at least 48"):
        widened(LlamaForCausalLM.from_pretrained(MODEL_PATH), 32)
