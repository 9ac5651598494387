"""The replay's prefix arm against vLLM's own prefix cache: its block manager, and an engine's counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvshare.replay.policies import make_policy, parse_policies
from tests.kvshare.replay.synthetic import policy_context, request
from tests.kvshare.vllm_connector.starts import OF_SMALL_BLOCKS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from tests.kvshare.vllm_connector.in_process_vllm import Vllm

BLOCK = 16
_END = 1  # what ends an answer; sampled last, so it has no KV


def _manager(num_blocks: int) -> KVCacheManager:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks + 1,  # vLLM keeps one as its null block
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(config, max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def _serve(manager: KVCacheManager, number: int, prompt: list[int], answer: list[int]) -> int:
    """Prefill, then a step a token, then free; the prompt tokens that vLLM found cached."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    sequence = Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=len(answer) + 1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    blocks, num_cached, *_ = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, len(prompt) - num_cached, num_cached, blocks) is not None
    sequence.num_computed_tokens = len(prompt)
    for token in answer:
        sequence.append_output_token_ids(token)
        assert manager.allocate_slots(sequence, 1) is not None
        sequence.num_computed_tokens += 1
    sequence.append_output_token_ids(_END)
    manager.free(sequence)
    return int(num_cached)


@pytest.mark.parametrize("num_blocks", [30, 60, 400])
def test_hits_are_vllms(num_blocks: int) -> None:
    """Chats that go on, forms and strangers, over stores from too small to ample: the same hits each time."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    rng = np.random.default_rng(num_blocks)
    manager = _manager(num_blocks)
    (spec,) = parse_policies("prefix")
    arm = make_policy(spec, policy_context(), num_blocks * BLOCK)
    chats: list[list[int]] = [[] for _ in range(6)]
    form = rng.integers(2, 1000, 100).tolist()
    num_hits = 0
    for number in range(200):
        chat = int(rng.integers(len(chats)))
        fresh = rng.integers(2, 1000, int(rng.integers(1, 60))).tolist()
        prompt = [*chats[chat], *fresh] if rng.random() < 0.7 else [*form, *fresh]
        answer = rng.integers(2, 1000, int(rng.integers(0, 40))).tolist()
        outcome = arm.observe(request(number, prompt, answer=answer))
        assert outcome.num_hit == _serve(manager, number, prompt, answer)
        num_hits += outcome.num_hit > 0
        chats[chat] = [*prompt, *answer] if len(prompt) < 300 else []
    assert num_hits > 50


@OF_SMALL_BLOCKS
def test_hits_are_those_that_vllm_counts(vllm: Vllm) -> None:
    """A real engine answers the same requests; its metrics say what it looked up and what it found."""
    block_size = 32  # the smallest of vLLM's CPU backend
    assert vllm.llm.reset_prefix_cache()
    before = counted(vllm)
    (spec,) = parse_policies(f"prefix:block_size={block_size}")
    arm = make_policy(spec, policy_context())
    rng = np.random.default_rng(5)
    form = rng.integers(3, 300, 250).tolist()
    chat: list[int] = []
    num_looked_up = num_hits = 0
    for number in range(16):
        fresh = rng.integers(3, 300, int(rng.integers(1, 90))).tolist()
        prompt = [*chat, *fresh] if number % 2 else [*form, *fresh]
        (answer,) = vllm.ask((prompt, None, None), max_tokens=int(rng.integers(1, 12)))
        # What was sampled last was never computed: it has no KV.
        num_hits += arm.observe(request(number, prompt, answer=answer.tokens[:-1])).num_hit
        num_looked_up += len(prompt)
        chat = [*prompt, *answer.tokens] if number % 2 and len(prompt) < 700 else chat
    after = counted(vllm)
    assert after["vllm:prefix_cache_queries"] - before["vllm:prefix_cache_queries"] == num_looked_up
    assert after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"] == num_hits > 2000


def counted(vllm: Vllm) -> dict[str, float]:
    return {metric.name: metric.value for metric in vllm.llm.get_metrics() if hasattr(metric, "value")}
