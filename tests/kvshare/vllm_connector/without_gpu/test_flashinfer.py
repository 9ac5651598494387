"""
vLLM's FlashInfer backend with our metadata: its builder, which splits a batch into decodes and prefills, and
its implementation are vLLM's; the kernels of the `flashinfer` package are stand-ins. TensorRT-LLM's kernels,
which it takes instead where it finds them, are not tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.without_gpu.conftest import Interpreter

LIMIT = 1e-6  # the stand-ins round as dense attention does
WRONG = 1.0


@pytest.mark.parametrize("memory", ["LBNHC", "LBHNC"])
def test_short_runs_come_first_and_are_decodes(interpreter: Interpreter, memory: str) -> None:
    """Of 17, 1, 22 and 17 tokens, then of 7 and 1: behind a longer one a single token would be a prefill."""
    found = interpreter("flashinfer", memory=memory, dtype="bfloat16")
    assert found["planned"] == [["prefill", 3], ["decode", 1], ["prefill", 1], ["decode", 1]]
    assert found["layout"] == "content"
    assert found["read_back"] == found["elsewhere"] == 0
    assert max(found["attention"], found["kv"]) <= LIMIT


def test_a_pass_of_single_tokens_has_no_prefills(interpreter: Interpreter) -> None:
    found = interpreter("flashinfer", dtype="bfloat16", single=True)
    assert found["planned"] == [["decode", 4]]
    assert max(found["attention"], found["kv"]) <= LIMIT


@pytest.mark.parametrize("fault", ["blocks exchanged", "slot off by one"])
def test_what_is_wrong_is_seen(interpreter: Interpreter, fault: str) -> None:
    found = interpreter("flashinfer", dtype="bfloat16", fault=fault)
    assert min(found["attention"], found["kv"]) >= WRONG
