"""The options of `kvshare bench gpu` and the servers that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from kvshare.errors import ConfigError
from kvshare_lab.vllm.gpu.config import PARTS, STREAM_PROMPT, Config


def test_no_two_parts_draw_the_same_prompts() -> None:
    """What one part stored must not be met by another that takes it for unseen."""
    configs = [Config(seed=seed) for seed in range(3)]
    seeds = [part.seed for config in configs for part in map(config.part, PARTS)]
    assert len(set(seeds)) == len(seeds)
    for config in configs:
        own = (config.parity, config.load, config.soak, config.inter_token)
        assert len({part.seed for part in own}) == len(own)


def test_the_cache_holds_what_is_timed() -> None:
    """Streams and clients must not be preempted while they are timed; every part fits the model's length."""
    config = Config(prompt_tokens=2000, streams=8, output_tokens=128, concurrency=16, load_tokens=1000)
    assert config.cache_tokens is not None
    assert config.cache_tokens > 8 * (STREAM_PROMPT + 128) + 2 * 2000
    assert config.cache_tokens > 16 * 1000
    assert config.max_model_len > max(2000 + 128, config.soak.max_model_len, config.parity.tokens)
    options = config.for_backend("SOME_ATTN", checks_syncs=True).vllm
    assert options.arguments[options.arguments.index("--attention-backend") + 1] == "SOME_ATTN"
    assert options.environment["VLLM_GPU_SYNC_CHECK"] == "warn"


@pytest.mark.parametrize(("gib", "kv_gib"), [(79, (14, 17)), (24, None)])
def test_on_a_gpu_the_large_model_is_measured(
    monkeypatch: pytest.MonkeyPatch, gib: int, kv_gib: tuple[int, int] | None
) -> None:
    """
    With prompts as in use, and the backend that vLLM chooses. Each vLLM gets what its share of the device has
    next to the weights, so that both start at once; on a small device vLLM finds out what fits.
    """
    assert Config().prompt_tokens <= 2000
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    device = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    config = Config().fitted()
    assert (config.chosen_model, config.prompt_tokens, config.load_tokens) == ("random-8b", 32_768, 8000)
    assert (config.concurrency, config.answer_tokens, config.families) == (16, 32, 6)
    vllm = config.options.vllm
    assert (vllm.num_blocks, vllm.attention_backend, vllm.device_memory) == (None, None, 0.42)
    assert config.max_model_len >= 32_768 + 128
    if kv_gib is None:
        assert vllm.device_kv_bytes is None
    else:
        least, most = kv_gib
        assert least * 2**30 < (vllm.device_kv_bytes or 0) < most * 2**30
        assert "--kv-cache-memory-bytes" in vllm.arguments


def test_prompts_are_no_longer_than_the_model_takes(tmp_path: Path) -> None:
    """As its configuration says; models of random weights take any length."""
    LlamaConfig(max_position_embeddings=1024).save_pretrained(tmp_path)
    fitted = Config(model=str(tmp_path), prompt_tokens=5000, load_tokens=3000, output_tokens=100).fitted()
    assert fitted.prompt_tokens == fitted.load_tokens == 1024 - 64 - 100
    assert fitted.max_model_len <= 1024 + fitted.soak.max_model_len
    assert Config(model="random-tiny", prompt_tokens=5000).fitted().prompt_tokens == 5000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backends": ","}, "--backends"),
        ({"parts": "ttft,nothing"}, "--parts"),
        ({"shares": "1,2"}, "--shares"),
        ({"shares": "half"}, "--shares"),
        ({"rate": "0"}, "--rate"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(options: dict[str, Any], named: str) -> None:
    """Not after minutes."""
    with pytest.raises(ConfigError, match=named):
        Config(**options).fitted()


def test_parts_and_backends_may_be_chosen() -> None:
    """Parts keep their order, and the self-test is always one; vLLM chooses the backend by default."""
    assert Config(parts="soak, ttft").part_names == ["self_test", "ttft", "soak"]
    assert Config().part_names == list(PARTS)
    assert Config(backends="TRITON_ATTN, FLASH_ATTN").backend_names == ["TRITON_ATTN", "FLASH_ATTN"]
    assert Config().backend_names == [None]
    assert Config(shares="1,.5,0").near_shares == [1.0, 0.5, 0.0]


def test_a_model_of_a_folder_is_published_by_its_name() -> None:
    """Where it lies, and where the document goes, is not published."""
    config = Config(model="/somewhere/of/mine/qwen", out=Path("/somewhere/else.json"))
    assert config.options.to_json()["model"] == "qwen"
    assert "/somewhere" not in json.dumps([config.to_json(), config.options.to_json()])
