"""
What vLLM's own offloading to host memory would reuse of a log: its manager and its policies, without a GPU.

A request's equal prefix is what the manager finds of its blocks in order. Then all its blocks are offered, as
vLLM does with those that it has computed. LMCache evicts by the rule of `lru`, over chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvshare_lab.bench.oracle_cache import RequestBlocks


def offloaded_hits(stream: Sequence[RequestBlocks], capacity: int, policy: str) -> int:
    """How many blocks the requests reuse, with room for `capacity` blocks. `policy`: lru, arc."""
    manager = CPUOffloadingManager(capacity, policy)
    return sum(_asked(manager, number, request) for number, request in enumerate(stream))


def _asked(manager: CPUOffloadingManager, number: int, request: RequestBlocks) -> int:
    keys = [make_offload_key(digest, 0) for digest in request.digests]
    context = ReqContext(str(number))
    manager.on_new_request(context)
    looked_up = (place for place, key in enumerate(keys) if manager.lookup(key, context) != LookupResult.HIT)
    num_found = min(next(looked_up, len(keys)), request.num_reusable)
    if num_found:
        manager.prepare_load(keys[:num_found], context)
        manager.complete_load(keys[:num_found], context)
    offered = manager.prepare_store(keys, context)
    if offered is not None:  # else there is no room for all of them, and none is stored
        manager.complete_store(offered.keys_to_store, context)
    manager.on_request_finished(context)
    return num_found
