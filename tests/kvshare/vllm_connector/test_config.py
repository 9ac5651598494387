"""The connector's settings, and what of vLLM's configuration is not supported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Start


def config(**changes: Any) -> SimpleNamespace:
    """As much of a VllmConfig as `unsupported_reasons` reads; everything supported but for the changes."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        data_parallel_size=1,
        data_parallel_index=0,
        data_parallel_hybrid_lb=False,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    model = SimpleNamespace(
        runner_type="generate",
        is_encoder_decoder=False,
        is_attention_free=False,
        is_hybrid=False,
        use_mla=False,
        is_multimodal_model=False,
        enable_prompt_embeds=False,
        attention_chunk_size=None,
    )
    for part in (parallel, model):
        for key in vars(part).keys() & changes.keys():
            setattr(part, key, changes[key])
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        speculative_config=changes.get("speculative"),
        lora_config=changes.get("lora"),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=changes.get("policy", "recompute"),
            engine_id=changes.get("engine_id", "0b7c"),
        ),
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"data_parallel_size": 2}, "data parallelism of a model with experts"),
        ({"engine_id": "0b7c_dp0", "data_parallel_hybrid_lb": True}, "several API servers"),
        ({"decode_context_parallel_size": 2}, "context parallel"),
        ({"use_mla": True}, "MLA"),
        ({"is_hybrid": True}, "hybrid"),
        ({"attention_chunk_size": 8192}, "chunks of 8192"),
        ({"is_attention_free": True}, "recurrent"),
        ({"speculative": object()}, "speculative"),
        ({"cache_dtype": "fp8"}, "fp8"),
        ({"policy": "fail"}, "recompute"),
        ({"runner_type": "pooling"}, "pooling"),
        ({"is_multimodal_model": True}, "multimodal"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"lora": object()}, "LoRA"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], word: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvshare.vllm_connector.config import unsupported_reasons

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    assert unsupported_reasons(config(), cache) == []
    (message,) = unsupported_reasons(config(**changes), cache)
    assert word in message


@pytest.mark.parametrize(
    ("engine_id", "index", "rank"),
    [("0b7c", 0, None), ("0b7c_dp0", 0, 0), ("0b7c_dp12", 12, 12), ("a_users_own_dp3", 0, None)],
)
def test_a_rank_is_known_by_its_engines_id(engine_id: str, index: int, rank: int | None) -> None:
    """vLLM takes the size away from a dense rank; an id that only looks like a rank's is none."""
    from kvshare.vllm_connector.config import data_parallel_rank

    assert data_parallel_rank(config(engine_id=engine_id, data_parallel_index=index)) == rank


def test_ranks_without_experts_are_supported() -> None:
    """Each is an engine of its own."""
    from kvshare.vllm_connector.config import unsupported_reasons

    cache = SimpleNamespace(kv_cache_groups=[])
    (message,) = unsupported_reasons(config(engine_id="0b7c_dp1", data_parallel_index=1), cache)
    assert message == "the model has no KV cache"


def test_vllms_own_settings_are_read_right(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the configuration that vLLM made itself, set as it sets it for a model with images, or for XPU."""
    from vllm.config import MultiModalConfig
    from vllm.platforms import current_platform

    from kvshare.vllm_connector.config import unsupported_reasons

    vllm = start("llama")
    config, cache = vllm.core.vllm_config, vllm.scheduler.kv_cache_config
    assert unsupported_reasons(config, cache) == []
    with monkeypatch.context() as patch:
        patch.setattr(config.model_config, "multimodal_config", MultiModalConfig())
        (reason,) = unsupported_reasons(config, cache)
        assert "multimodal" in reason
    with monkeypatch.context() as patch:
        patch.setattr(type(current_platform), "is_cpu", lambda _: False)
        patch.setattr(type(current_platform), "device_name", "xpu")
        (reason,) = unsupported_reasons(config, cache)
        assert "xpu" in reason


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"max_byte": 1}, "max_byte"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": "1"}, "max_bytes"),
        ({"control_host": 1}, "control_host"),
        ([], "dictionary"),
        ({"control_token": "s3cret"}, "control_token"),
    ],
)
def test_settings_name_what_is_wrong(given: object, word: str) -> None:
    from kvshare.vllm_connector.config import ConnectorSettings

    with pytest.raises(ValueError, match=word):
        ConnectorSettings.from_extra_config({"kvshare": given})
