"""The connector's settings, and what of vLLM's configuration is not supported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Vllm


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
        is_multimodal_raw_input_only_model=False,
        attention_chunk_size=None,
        uses_mrope=False,
        is_mm_prefix_lm=False,
    )
    for part in (parallel, model):
        for key in vars(part).keys() & changes.keys():
            setattr(part, key, changes[key])
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        speculative_config=changes.get("speculative"),
        use_v2_model_runner=changes.get("runner") == "V2",
        cache_config=SimpleNamespace(
            cache_dtype=changes.get("cache_dtype", "auto"),
            kv_cache_dtype_skip_layers=changes.get("skipped", []),
        ),
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
        ({"cache_dtype": "nvfp4"}, "quantised KV caches (nvfp4)"),
        ({"cache_dtype": "int8_per_token_head"}, "quantised KV caches (int8_per_token_head)"),
        ({"cache_dtype": "fp8_per_token_head"}, "quantised KV caches (fp8_per_token_head)"),
        ({"cache_dtype": "fp8", "skipped": ["0"]}, "layers that keep their dtype (0)"),
        ({"policy": "fail"}, "recompute"),
        ({"runner_type": "pooling"}, "pooling"),
        ({"is_multimodal_raw_input_only_model": True}, "without text"),
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
    ("changes", "word"),
    [
        ({"method": "ngram"}, None),
        ({"method": "suffix"}, None),
        ({"method": "draft_model"}, None),
        ({"method": "draft_model", "max_model_len": 2048}, "takes 2048 tokens"),
        ({"method": "draft_model", "use_heterogeneous_vocab": True}, "vocabulary"),
        ({"method": "draft_model", "parallel_drafting": True}, "in parallel"),
        ({"method": "draft_model", "is_multimodal_model": True}, "media"),
        ({"method": "draft_model", "runner": "V2"}, None),
        ({"method": "ngram_gpu", "runner": "V2"}, None),
        ({"method": "eagle", "architectures": ["EagleLlamaForCausalLM"]}, None),
        ({"method": "eagle3", "architectures": ["Eagle3LlamaForCausalLM"]}, None),
        (
            {"method": "eagle3", "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
            "Eagle3DeepseekV2ForCausalLM",
        ),
        ({"method": "eagle", "runner": "V2"}, None),
        ({"method": "mtp", "architectures": ["Glm4MoeMTPModel"]}, None),
        ({"method": "mtp", "architectures": ["Qwen3_5MTP"]}, "Qwen3_5MTP"),
        ({"method": "mtp", "architectures": ["Glm4MoeMTPModel"], "n_predict": 3}, "3 layers"),
        ({"method": "mtp", "architectures": ["Gemma4MTPModel"], "is_multimodal_model": True}, None),
        ({"method": "medusa"}, "by medusa"),
        ({"method": "a new one"}, "hidden states"),
    ],
)
def test_what_may_be_shared_with_a_method_of_speculation(changes: dict[str, Any], word: str | None) -> None:
    """None of them refuses the server: with some requests pass unshared."""
    from kvshare.vllm_connector.config import known_reasons
    from kvshare.vllm_connector.speculation import why_unshared

    kinds = ["EagleLlamaForCausalLM"]
    draft = {"max_model_len": 4096, "is_multimodal_model": False, "architectures": kinds}
    fields = {"method": "", "use_heterogeneous_vocab": False, "parallel_drafting": False} | changes
    draft |= {name: changes[name] for name in draft.keys() & changes.keys()}
    draft["hf_config"] = SimpleNamespace(n_predict=changes.get("n_predict"))
    speculative = SimpleNamespace(**fields, draft_model_config=SimpleNamespace(**draft))
    given = config(speculative=speculative, runner=changes.get("runner"))
    given.model_config.max_model_len = 4096
    assert known_reasons(given) == []
    reason = why_unshared(given)
    assert reason is None if word is None else word in str(reason)


@pytest.mark.parametrize(
    ("method", "runner", "late"),
    [("eagle", "V2", True), ("eagle", "V1", False), ("ngram", "V2", False), ("mtp", "V2", True)],
)
def test_only_runner_v2_drafts_after_it_has_reported_a_step(method: str, runner: str, late: bool) -> None:
    """It matters where what drafts has rows of its own."""
    from kvshare.vllm_connector.speculation import drafts_after_report

    draft = SimpleNamespace(architectures=["Glm4MoeMTPModel"])
    given = config(speculative=SimpleNamespace(method=method, draft_model_config=draft), runner=runner)
    assert drafts_after_report(given) == late


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_kv_of_eight_bits_is_supported(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """With the format that NVIDIA's GPUs and CPUs have."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    from kvshare.vllm_connector.config import unsupported_reasons

    def reasons(mode: KVQuantMode, cache_dtype: str = dtype) -> list[str]:
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=32, dtype=torch.uint8, kv_quant_mode=mode
        )
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        return unsupported_reasons(config(cache_dtype=cache_dtype), cache)

    assert reasons(KVQuantMode.FP8_PER_TENSOR) == []
    (of_weights,) = reasons(KVQuantMode.NVFP4, "auto")  # vLLM learnt of it with the weights
    assert "quantised KV caches" in of_weights
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    (message,) = reasons(KVQuantMode.FP8_PER_TENSOR)
    assert "fnuz" in message


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, False),
        ({"is_hybrid": True}, True),
        ({"speculative": SimpleNamespace(method="ngram")}, False),
        ({"speculative": SimpleNamespace(method="medusa")}, True),
    ],
)
def test_a_model_that_shares_nothing_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], left: bool
) -> None:
    """On a GPU vLLM's KV cache is smaller by what the connector needs, if it will need it."""
    from vllm.platforms import current_platform

    from kvshare.vllm_connector import workers
    from kvshare.vllm_connector.worker.device import RESERVED_BYTES

    monkeypatch.setattr(workers.KVShareWorker.__base__, "determine_available_memory", lambda _: 1 << 34)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    worker = object.__new__(workers.KVShareWorker)
    worker.vllm_config = config(**changes)
    assert worker.determine_available_memory() == (1 << 34) - (0 if left else RESERVED_BYTES)


def test_our_kernels_are_compiled_before_vllm_watches_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it does so within its own warm-up; where it does not, the model comes after that. Once."""
    from kvshare.vllm_connector import workers

    calls: list[str] = []
    base = workers.KVShareWorker.__base__
    found = SimpleNamespace(attach_model=lambda *_: calls.append("attach"))
    monkeypatch.setattr(workers, "_connector", lambda: found)
    monkeypatch.setattr(base, "_maybe_activate_jit_monitor", lambda _: calls.append("watch"))
    for warm_up in (workers.KVShareWorker._maybe_activate_jit_monitor, lambda _: None):
        monkeypatch.setattr(base, "compile_or_warm_up_model", warm_up)
        worker = object.__new__(workers.KVShareWorker)
        worker.model_runner, worker.vllm_config = SimpleNamespace(get_model=object), config()
        worker.compile_or_warm_up_model()
    assert calls == ["attach", "watch", "attach"]


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


def test_vllms_own_settings_are_read_right(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the configuration that vLLM made itself, set as it sets it for XPU."""
    from vllm.platforms import current_platform

    from kvshare.vllm_connector.config import unsupported_reasons

    config, cache = vllm.core.vllm_config, vllm.scheduler.kv_cache_config
    assert unsupported_reasons(config, cache) == []
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


def test_the_page_of_models_lists_vllms_architectures() -> None:
    """Each generative one of the registry once, and no other."""
    import re
    from pathlib import Path

    from vllm.model_executor.models import registry

    page = (Path(__file__).parents[3] / "docs/models.md").read_text("utf-8")
    rows = page.split("<!-- architectures:begin -->")[1].split("<!-- architectures:end -->")[0]
    cells = "".join(line.split("|")[3] for line in rows.strip().splitlines()[2:])
    expected = {
        *registry._TEXT_GENERATION_MODELS,
        *registry._MULTIMODAL_MODELS,
        *registry._TRANSFORMERS_SUPPORTED_MODELS,
    }
    assert sorted(re.findall(r"\w+(?=[,\s(])", cells.replace("(tested)", ""))) == sorted(expected)
