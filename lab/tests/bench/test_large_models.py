"""Models that are written layer by layer load as any other, and are of the size that their name says."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvshare_lab.bench.bound import ModelSize
from kvshare_lab.bench.random_models import kv_bytes_per_token, llama_config, write_model

NAME = "random-tiny"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of all files of a model."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}


def test_a_model_written_by_layer_loads_whole_and_sees_its_whole_prompt(tmp_path: Path) -> None:
    """A file for each layer and one for the rest; the first token changes the likeliest answers."""
    folder = write_model(NAME, tmp_path / "model", dtype="bfloat16", max_model_len=64)
    assert len(list(folder.glob("*.safetensors"))) == 5
    assert (folder / "tokenizer.json").exists()
    load: Any = AutoModelForCausalLM.from_pretrained
    model, loading = load(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.dtype == torch.bfloat16
    prompt = torch.arange(20, 52)[None]
    changed = prompt.clone()
    changed[0, 0] = 700
    with torch.inference_mode():
        one, other = (model(tokens).logits[0, -1].float().log_softmax(-1) for tokens in (prompt, changed))
    assert (one - other).abs().max() > 0.1


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    """Both servers read the same files; another seed is another model."""
    folders = [
        write_model(NAME, tmp_path / str(number), dtype="float32", max_model_len=64, seed=seed)
        for number, seed in enumerate((0, 0, 1))
    ]
    first, same, other = map(weights, folders)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    projection = first["model.layers.3.mlp.up_proj.weight"]
    assert abs(float(projection.std()) - 0.08) < 0.002


def test_the_large_model_has_the_shape_that_was_measured() -> None:
    """7 billion weights in 36 layers, 144 KiB of KV a token."""
    config = llama_config("random-8b", max_position_embeddings=32_768, vocab_size=1536)
    assert kv_bytes_per_token(config, "bfloat16") == 144 * 1024
    size = ModelSize.of_config(config)
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    assert (size.num_layers, size.layer_parameters) == (36, 36 * layer)
