"""
Our Triton kernels, run by Triton's interpreter on caches as vLLM arranges them, against plain indexing: rows,
sums and all that lies next to them must be equal bit by bit.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.without_gpu.conftest import Ask

CONNECTOR = Path(__file__).parents[4] / "kvshare" / "vllm_connector"

CASES: list[dict[str, Any]] = [
    *({"memory": memory} for memory in ("LBNHC", "LBHNC", "BLHNC", "HLNBC")),
    *({"dim": dim, "dtype": dtype} for dim in (128, 80) for dtype in ("bfloat16", "float16")),
    {"dtype": "float32", "memory": "LBHNC"},
    *({"dtype": dtype, "dim": 24, "num_heads": 3, "num_layers": 3} for dtype in ("float32", "bfloat16")),
    *({"dtype": "float8_e4m3fn", "dim": dim, "batch": "without movement"} for dim in (64, 80, 6, 3)),
    {"block_size": 32, "memory": "LBHNC"},
    {"num_heads": 1, "num_layers": 5},
    *({"movement": name} for name in ("interleaved", "first dimensions", "last dimensions", "values, too")),
    {"movement": "by layer", "num_layers": 3},
    {"movement": "nothing"},
    {"batch": "scattered"},
    {"batch": "long"},
]

SEEN_BY = {
    "slots exchanged": {"gathered", "scattered"},
    "the next layer": {"gathered", "scattered"},
    "the next head": {"gathered", "scattered"},
    "a piece less": {"gathered", "scattered"},
    "a token earlier": {"gathered", "scattered"},
    "a position further": {"scattered"},
}


def name_of(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernels_do_what_plain_indexing_does(own_kernels: Ask, case: dict[str, Any]) -> None:
    """Each row lands in its slot, rotated by its shift, and nothing else is written."""
    assert own_kernels(case) == {"gathered": 0, "scattered": 0, "sums": 0}


@pytest.mark.parametrize("fault", SEEN_BY)
def test_what_is_wrong_is_seen(own_kernels: Ask, fault: str) -> None:
    """The comparison above fails if kernels are told otherwise; a sum changes with a single bit."""
    found = own_kernels({"fault": fault})
    assert {name for name, count in found.items() if count} == {*SEEN_BY[fault], "sums"}
    assert found["sums"] == 1


def test_only_the_kernels_need_triton() -> None:
    """All other modules of the connector can be imported without it."""
    with_triton = {
        path.name
        for path in CONNECTOR.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "triton" in ast.unparse(node)
    }
    assert with_triton == {"kernels.py"}
