"""vLLM's own configuration, and its KV cache, for a model that has no weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvshare.vllm_connector.worker.ranks import num_ranks
from kvshare_lab.device.profile import Model


def vllm_config(model: Model, folder: Path, *, shares: bool = False) -> VllmConfig:
    """vLLM's own, of a model without weights. The CPU platform turns async scheduling off; it is on here."""
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * model.num_heads * model.head_dim,
        "intermediate_size": 12 * model.num_heads * model.head_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": 4 * model.num_heads,
        "num_key_value_heads": model.num_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_model_len,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(text))
    transfer = KVTransferConfig(
        kv_connector="KVShareConnector",
        kv_connector_module_path="kvshare.vllm_connector.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvshare": {"control_port": 0, "max_bytes": num_ranks() * model.kv_bytes}},
    )
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=model.step_tokens,
        block_size=model.block_size,
        kv_transfer_config=transfer if shares else None,
        enable_prefix_caching=True,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = model.cache_tokens // model.block_size
    return config


def kv_cache_config(model: Model) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=model.block_size,
        num_kv_heads=model.num_heads,
        head_size=model.head_dim,
        dtype=torch.bfloat16,
    )
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(model.num_layers)]
    num_blocks = model.cache_tokens // model.block_size
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(names, spec)])
