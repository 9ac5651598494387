"""Models whose layers differ in KV heads, head size or dtype: what vLLM says of each of them is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kvshare.vllm_connector.test_config import config


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_kv_heads": 1, "head_size": 64}, ""),
        ({"head_size": 64, "head_size_v": 32}, "keys and values of different head sizes"),
        ({"kv_quant_mode": "NVFP4"}, "quantised KV caches"),
        ({"sliding_window": 8, "kind": "SlidingWindowSpec"}, "SlidingWindowSpec"),
    ],
)
def test_each_layer_is_looked_at_where_layers_differ(changes: dict[str, Any], word: str) -> None:
    """The first one is as all others would be; the second is changed."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    from kvshare.vllm_connector.config import unsupported_reasons

    fields: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    own = {"kind": "FullAttentionSpec", **fields, **changes}
    other = getattr(interface, own.pop("kind"))
    if "kv_quant_mode" in own:
        own["kv_quant_mode"] = interface.KVQuantMode[own["kv_quant_mode"]]
    specs = {"first": interface.FullAttentionSpec(**fields), "second": other(**own)}
    together = interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    found = unsupported_reasons(
        config(), SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=together)])
    )
    assert [word in reason for reason in found] == [True] * bool(word)


def test_layers_that_use_the_kv_of_another_get_its_spec() -> None:
    """Of layers that differ; vLLM's own configuration stays as it is."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        UniformTypeKVCacheSpecs,
    )

    from kvshare.vllm_connector.workers import with_users_of_kv

    specs = {
        name: FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=size, dtype=torch.float32)
        for name, size in (("small", 32), ("large", 64))
    }
    together = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(specs))
    group = KVCacheGroupSpec(list(specs), together)
    layers = {name: SimpleNamespace(kv_sharing_target_layer_name=None) for name in specs}
    layers["user"] = SimpleNamespace(kv_sharing_target_layer_name="large")
    given = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    made = with_users_of_kv(given, layers).kv_cache_groups[0].kv_cache_spec
    assert isinstance(made, UniformTypeKVCacheSpecs)
    assert made.kv_cache_specs == {**specs, "user": specs["large"]}
    assert together.kv_cache_specs == specs
