"""
vLLM's FlashAttention 3 backend with our metadata: `FlashAttentionImpl`, `FlashAttentionMetadataBuilder` and
the Python interface of the kernels are vLLM's. Only the CUDA kernels themselves are stand-ins, which compute
in torch and refuse what the kernels would not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from tests.kvshare.vllm_connector.without_gpu.attention_model import Setting
    from tests.kvshare.vllm_connector.without_gpu.flash_attention_kernels import Kernels

LIMIT = 1e-6  # the stand-ins round as dense attention does
WRONG = 1.0


class Make(Protocol):
    def __call__(self, **changes: Any) -> tuple[Setting, Kernels]: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(memory="LBNHC")`: the backend over caches in memory, and its kernels."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    from tests.kvshare.vllm_connector.without_gpu.attention_model import MAX_RUNS, Case, Setting
    from tests.kvshare.vllm_connector.without_gpu.flash_attention_kernels import Kernels

    kernels = Kernels(MAX_RUNS)

    def begin(**changes: Any) -> tuple[Setting, Kernels]:
        case = Case(**{"dtype": "bfloat16", **changes})
        return Setting(case, FlashAttentionBackend, tmp_path), kernels

    with kernels.installed():
        yield begin


@pytest.mark.parametrize("memory", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("kind", ["LONG", "SINGLE"])
def test_the_kernels_take_our_metadata(make: Make, memory: str, head_size: int, kind: str) -> None:
    """And with it each run's rows get what dense attention gives; there is a schedule for each pass."""
    from tests.kvshare.vllm_connector.without_gpu import attention_model, scattered_runs

    setting, kernels = make(memory=memory, head_size=head_size)
    found = scattered_runs.try_out(setting, getattr(scattered_runs, kind))
    assert found.layout == "content"
    assert found.read_back == found.elsewhere == 0
    assert max(found.attention, found.kv) <= LIMIT
    assert kernels.batches == {"LONG": [4, 2], "SINGLE": [4]}[kind]
    assert kernels.num_attended == len(kernels.batches) * attention_model.NUM_LAYERS


def test_one_kv_head_on_a_rank(make: Make) -> None:
    """As tensor parallelism over as many ranks as there are kv heads makes it."""
    from tests.kvshare.vllm_connector.without_gpu.scattered_runs import LONG, try_out

    setting, _ = make(num_kv_heads=1)
    found = try_out(setting, LONG)
    assert max(found.attention, found.kv) <= LIMIT


@pytest.mark.parametrize("fault", ["blocks exchanged", "one slot too many", "slot off by one"])
def test_what_the_kernels_cannot_refuse_is_seen(make: Make, fault: str) -> None:
    from tests.kvshare.vllm_connector.without_gpu.scattered_runs import FAULTS, LONG, try_out

    setting, _ = make()
    found = try_out(setting, LONG, FAULTS[fault])
    assert min(found.attention, found.kv) >= WRONG


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda made: {"block_table_tensor": made.block_table_tensor.long()}, "int32 block table"),
        (
            lambda made: {"block_table_tensor": made.block_table_tensor.t().contiguous().t()},
            "rows contiguous",
        ),
        (lambda made: {"block_table_tensor": made.block_table_tensor[:, :1].contiguous()}, "as wide as"),
        (lambda made: {"block_table_tensor": made.block_table_tensor + 64}, "pages that there are"),
        (lambda made: {"seq_lens": made.seq_lens.long()}, "int32 lengths"),
        (lambda made: {"query_start_loc": made.query_start_loc.long()}, "int32 lengths"),
        (lambda made: {"query_start_loc": made.query_start_loc[[0, 2, 1, 3, 4]]}, "never decrease"),
        (lambda made: {"query_start_loc": made.query_start_loc[1:]}, "starts from 0"),
        (lambda made: {"max_query_len": made.max_query_len - 1}, "longest query"),
        (lambda made: {"max_seq_len": made.max_seq_len - 1}, "longest sequence"),
        (lambda made: {"seq_lens": made.seq_lens // 64 + 1, "max_seq_len": 2}, "end of what it sees"),
        (lambda made: {"causal": False}, "causal"),
    ],
)
def test_metadata_that_is_not_as_the_kernels_want_it(
    make: Make, change: Callable[[CommonAttentionMetadata], dict[str, Any]], refusal: str
) -> None:
    """What the stand-ins demand, they notice: the tests above would fail with any of these."""
    from tests.kvshare.vllm_connector.without_gpu.demands import Refused
    from tests.kvshare.vllm_connector.without_gpu.scattered_runs import LONG, fault_in_metadata, try_out

    setting, _ = make()
    fault = fault_in_metadata(lambda made: replace(made, **change(made)))
    with pytest.raises(Refused, match=refusal):
        try_out(setting, LONG, fault)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda slots: slots.int(), "int64 slots"),
        (lambda slots: slots + 64 * 16, "slots that there are"),
    ],
)
def test_slots_that_are_not_as_the_kernels_want_them(
    make: Make, change: Callable[[torch.Tensor], torch.Tensor], refusal: str
) -> None:
    from tests.kvshare.vllm_connector.without_gpu.demands import Refused
    from tests.kvshare.vllm_connector.without_gpu.scattered_runs import LONG, fault_in_slots, try_out

    setting, _ = make()
    with pytest.raises(Refused, match=refusal):
        try_out(setting, LONG, fault_in_slots(change))


def test_more_runs_than_vllms_buffers_have_rows(make: Make) -> None:
    """`PartialForward` splits by the number that vLLM was configured with."""
    from tests.kvshare.vllm_connector.without_gpu.demands import Refused
    from tests.kvshare.vllm_connector.without_gpu.scattered_runs import LONG, try_out

    setting, kernels = make()
    kernels.max_num_seqs -= 1
    with pytest.raises(Refused, match="vLLM's buffers"):
        try_out(setting, LONG)
