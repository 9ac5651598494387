"""
What the connector uses of vLLM is there, in the vLLM that is installed and in the sources of another version.

Nothing of vLLM is imported: files are read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kvshare.vllm_connector.sources.our_files import OurFile
from tests.kvshare.vllm_connector.sources.versions import at
from tests.kvshare.vllm_connector.sources.vllm_sources import Function, Sources

ROOT = Path(__file__).parents[4]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OURS = sorted((ROOT / "kvshare" / "vllm_connector").rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if " vllm" in path.read_text())


ATTENTION, V1 = "vllm.v1.attention.backends", "vllm.v1"
SCHEDULED = "vllm.v1.core.sched.output"
WRITES = "do_kv_cache_update forward scale"
WINDOWS = "sliding_window logits_soft_cap sinks"

# Attributes of objects whose class our code does not name: the class, what is read, and the file that does.
ATTRIBUTES = [
    ("vllm.model_executor.layers.attention:Attention", "impl kv_cache", "worker/paged_cache.py"),
    ("vllm.model_executor.layers.attention:Attention", "get_attn_backend", "worker/partial_forward.py"),
    (f"{ATTENTION}.cpu_attn:CPUAttentionBackendImpl", WRITES, "worker/"),
    (f"{ATTENTION}.flash_attn:FlashAttentionImpl", f"{WRITES} {WINDOWS}", "worker/"),
    (f"{ATTENTION}.triton_attn:TritonAttentionImpl", f"{WRITES} {WINDOWS}", "worker/"),
    (f"{ATTENTION}.flashinfer:FlashInferImpl", f"{WRITES} {WINDOWS}", "worker/"),
    (f"{V1}.attention.backend:AttentionBackend", "get_name get_builder_cls", "worker/metadata_builders.py"),
    (f"{V1}.attention.backend:AttentionMetadataBuilder", "build", "worker/partial_forward.py"),
    (f"{V1}.kv_cache_interface:KVCacheSpec", "copy_with_new_block_size", "worker/metadata_builders.py"),
    (f"{V1}.kv_cache_interface:KVCacheSpec", "block_size", "worker/start.py"),
    (
        "vllm.distributed.parallel_state:GroupCoordinator",
        "world_size rank_in_group cpu_group",
        "worker/ranks.py",
    ),
    (
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase",
        "base _compute_inv_freq _compute_cos_sin_cache",
        "worker/model.py",
    ),
    (f"{BASE}:KVConnectorBase_V1", "_kv_transfer_config _connector_metadata", "connector.py"),
    (f"{V1}.worker.gpu_model_runner:GPUModelRunner", "get_model", "workers.py"),
    (f"{V1}.worker.gpu.model_runner:GPUModelRunner", "get_model", "workers.py"),
    (f"{V1}.worker.gpu_model_runner:GPUModelRunner", "drafter", "speculation.py"),
    (f"{V1}.worker.gpu.model_runner:GPUModelRunner", "speculator", "speculation.py"),
    (f"{V1}.spec_decode.llm_base_proposer:SpecDecodeBaseProposer", "model", "speculation.py"),
    (
        "vllm.config.speculative:SpeculativeConfig",
        "method draft_model_config use_heterogeneous_vocab parallel_drafting",
        "speculation.py",
    ),
    ("vllm.platforms.interface:Platform", "is_cpu is_cuda_alike device_name", "config.py"),
    ("vllm.platforms.interface:Platform", "is_xpu is_sleep_mode_available", "workers.py"),
    ("vllm.platforms.interface:Platform", "device_type", "worker/device.py"),
    ("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory", "_registry", "plugin.py"),
    (
        f"{SCHEDULED}:SchedulerOutput",
        "scheduled_cached_reqs scheduled_new_reqs",
        "scheduler/retained_tokens.py",
    ),
    (f"{SCHEDULED}:SchedulerOutput", "kv_connector_block_state", "scheduler/saving.py"),
    (f"{SCHEDULED}:NewRequestData", "req_id num_computed_tokens", "scheduler/retained_tokens.py"),
    (f"{SCHEDULED}:CachedRequestData", "req_ids num_computed_tokens", "scheduler/retained_tokens.py"),
    (
        f"{SCHEDULED}:SchedulerOutput",
        "make_empty finished_req_ids scheduled_new_reqs num_scheduled_tokens total_num_scheduled_tokens "
        "num_spec_tokens_to_schedule",
        "worker/runner_prefill.py",
    ),
    (
        f"{V1}.worker.gpu_worker:Worker",
        "execute_model sample_tokens model_runner",
        "worker/runner_prefill.py",
    ),
    (f"{V1}.worker.worker_base:WorkerBase", "vllm_config", "worker/runner_prefill.py"),
    ("vllm.config.vllm:VllmConfig", "scheduler_config num_speculative_tokens", "worker/runner_prefill.py"),
    (
        "vllm.config.scheduler:SchedulerConfig",
        "max_num_scheduled_tokens max_num_batched_tokens",
        "worker/runner_prefill.py",
    ),
    (f"{V1}.worker.gpu.model_runner:GPUModelRunner", "kv_connector", "worker/runner_prefill.py"),
    (f"{V1}.worker.gpu.kv_connector:ActiveKVConnector", "set_disabled", "worker/runner_prefill.py"),
    (f"{SCHEDULED}:KVConnectorBlockState", "resolve_block_ids", "scheduler/saving.py"),
    (f"{V1}.core.block_pool:BlockPool", "touch free_blocks", "scheduler/block_donors.py"),
    (
        f"{V1}.core.kv_cache_utils:KVCacheBlock",
        "block_hash block_hash_num_tokens ref_cnt block_id",
        "scheduler/block_",  # donors and places
    ),
]

_read = cache(OurFile)


def files(paths: list[Path]) -> Iterator[OurFile]:
    for path in paths:
        yield _read(path, ROOT)


@pytest.mark.parametrize("paths", [OURS, TESTS], ids=["connector", "tests"])
def test_every_import_is_there(sources: Sources, paths: list[Path]) -> None:
    """Also those of the tests and their fakes."""
    uses = [use for file in files(paths) for use, _ in file.imports]
    assert len(uses) > 20
    missing = [
        use
        for use in uses
        if (sources.find(use.module, use.name) if use.name else sources.module(use.module)) is None
    ]
    assert missing == []


@pytest.mark.parametrize("paths", [OURS, TESTS], ids=["connector", "tests"])
def test_every_call_fits(sources: Sources, paths: list[Path]) -> None:
    """Of functions and classes that are imported: no name is unknown, and nothing is missing."""
    problems, num_checked = [], 0
    for file in files(paths):
        for use, call in file.calls():
            found = sources.find(use.module, use.name)
            if found is None or not isinstance(found.node, ast.ClassDef | Function):
                continue
            num_checked += 1
            if (problem := sources.signature(found).problem(call)) is not None:
                problems.append(f"{use.where}: {use.name} {problem}")
    assert num_checked > 5
    assert problems == []


def test_every_attribute_of_a_named_class_is_there(sources: Sources) -> None:
    """Of parameters that are annotated with a class of vLLM, and of what these have."""
    missing, owners = [], set()
    for file in files(OURS):
        for where, owner, name in file.reads(sources):
            assert isinstance(owner.node, ast.ClassDef)
            owners.add(owner.node.name)
            if name not in sources.members(owner):
                missing.append(f"{where}: {owner.node.name}.{name}")
    assert owners >= {"VllmConfig", "ModelConfig", "ParallelConfig", "Request", "SchedulerOutput"}
    assert missing == []


@pytest.mark.parametrize(("place", "names", "where"), ATTRIBUTES)
def test_every_other_attribute_is_there(sources: Sources, place: str, names: str, where: str) -> None:
    """Those that cannot be derived are in a table, with the file that reads them."""
    members = sources.members(at(sources, place))
    assert [name for name in names.split() if name not in members] == []
    text = "".join(path.read_text() for path in OURS if where in path.as_posix())
    assert [name for name in names.split() if not re.search(rf"\b{name}\b", text)] == []
