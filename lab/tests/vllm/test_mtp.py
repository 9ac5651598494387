"""Models with a layer that drafts, as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvshare_lab.vllm.kinds import write_kind
from kvshare_lab.vllm.mtp import add_mtp_layer, write_as_ernie, write_fitting_mtp
from lab.tests.tiny_llama import tiny_llama


def llama(folder: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama(2))
    model.save_pretrained(folder)
    return model


def test_a_llama_in_the_form_of_ernies_models_says_the_same(tmp_path: Path) -> None:
    model = llama(tmp_path / "llama")
    write_as_ernie(load_file(tmp_path / "llama" / "model.safetensors"), model.config, {}, tmp_path / "ernie")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = model(tokens).logits
        same = AutoModelForCausalLM.from_pretrained(tmp_path / "ernie")(tokens).logits
    assert (logits - same).abs().max() < 1e-4


def test_a_layer_that_fits_stands_in_the_models_folder(tmp_path: Path) -> None:
    llama(tmp_path / "llama")
    weights = load_file(write_fitting_mtp(tmp_path / "llama", tmp_path / "pair") / "model.safetensors")
    assert {"model.mtp_linear_proj.0.weight", "model.mtp_block.0.self_attn.q_proj.weight"} <= weights.keys()
    assert torch.equal(
        weights["model.mtp_block.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"]
    )


def test_a_layer_is_added_after_the_models_own(tmp_path: Path) -> None:
    """With experts of its own, where the model's last layer has some."""
    folder = add_mtp_layer(write_kind("ernie4-5-moe", tmp_path / "ernie"))
    weights = load_file(folder / "model.safetensors")
    assert "model.mtp_block.0.mlp.up_proj.weight" in weights
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
