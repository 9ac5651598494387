"""
vLLM's Triton kernels for GPUs, run by Triton's interpreter, under our `PagedCache` and `PartialForward`: the
backend, its metadata builder, its attention kernels (2D, and 3D for single tokens) and its writing kernel are
vLLM's, on caches as vLLM arranges them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.without_gpu.conftest import Interpreter

LIMIT = {"float32": 2e-5, "bfloat16": 0.06}  # of the typical value
WRONG = 1.0

CASES = [
    *({"memory": memory, "head_size": size} for memory in ("LBNHC", "LBHNC") for size in (64, 128)),
    *({"dtype": "bfloat16", "head_size": size} for size in (64, 128)),
    {"memory": "BLHNC"},
    {"block_size": 32},  # the scheduler's; the kernel's is 16
    *({"dtype": dtype, "single": True} for dtype in LIMIT),
]


def name_of(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_scattered_runs_get_what_dense_attention_gives(
    interpreter: Interpreter, case: dict[str, Any]
) -> None:
    """Blocks are read as they were written, and nothing is written anywhere else."""
    found = interpreter("triton", **case)
    assert found["layout"] == "content"
    assert found["read_back"] == found["elsewhere"] == 0
    assert max(found["attention"], found["kv"]) <= LIMIT[case.get("dtype", "float32")]


@pytest.mark.parametrize("fault", ["blocks exchanged", "one slot too many", "slot off by one"])
def test_what_is_wrong_is_seen(interpreter: Interpreter, fault: str) -> None:
    """By what attention gives and by what the slots hold: the limits above are far below a fault's effect."""
    found = interpreter("triton", fault=fault)
    assert found["read_back"] == 0
    assert min(found["attention"], found["kv"]) >= WRONG
