"""
Our Triton kernels, run by Triton's interpreter on caches as vLLM arranges them, against plain indexing: rows,
sums and all that lies next to them must be equal bit by bit.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from delta_tree import Span
from kvshare.vllm_connector.worker.kernel_tables import StagedCopy, StagedPart

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.without_gpu.conftest import Ask

CONNECTOR = Path(__file__).parents[4] / "kvshare" / "vllm_connector"

CASES: list[dict[str, Any]] = [
    *({"memory": memory} for memory in ("LBNHC", "LBHNC", "BLHNC", "HLNBC")),
    *({"dim": dim, "dtype": dtype} for dim in (128, 80) for dtype in ("bfloat16", "float16")),
    {"dtype": "float32", "memory": "LBHNC"},
    *({"dtype": dtype, "dim": 24, "num_heads": 3, "num_layers": 3} for dtype in ("float32", "bfloat16")),
    *({"dtype": "float8_e4m3fn", "dim": dim, "batch": "without movement"} for dim in (64, 80, 6, 3)),
    *({"dtype": dtype, "dim": dim} for dtype in ("float8_e4m3fn", "float8_e5m2") for dim in (64, 24)),
    {"dtype": "float8_e4m3fn", "movement": "values, too", "memory": "LBHNC"},
    {"block_size": 32, "memory": "LBHNC"},
    {"num_heads": 1, "num_layers": 5},
    *({"movement": name} for name in ("interleaved", "first dimensions", "last dimensions", "values, too")),
    {"movement": "by layer", "num_layers": 3},
    {"movement": "nothing"},
    {"batch": "cut at layers", "num_layers": 3, "movement": "by layer"},
    {"batch": "some layers", "num_layers": 3, "num_heads": 3, "movement": "by layer"},
    {"batch": "scattered"},
    {"batch": "long"},
]

SEEN_BY = {
    "slots exchanged": {"gathered", "scattered", "copied"},
    "the next layer": {"gathered", "scattered"},
    "the next head": {"gathered", "scattered"},
    "a piece less": {"gathered", "scattered"},
    "a token earlier": {"gathered", "scattered"},
    "a position further": {"scattered", "copied"},
}


def name_of(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernels_do_what_plain_indexing_does(own_kernels: Ask, case: dict[str, Any]) -> None:
    """Each row lands in its slot, rotated by its shift, and nothing else is written."""
    assert own_kernels(case) == {"gathered": 0, "scattered": 0, "copied": 0, "sums": 0}


@pytest.mark.parametrize("fault", SEEN_BY)
def test_what_is_wrong_is_seen(own_kernels: Ask, fault: str) -> None:
    """The comparison above fails if kernels read a wrong table; a sum changes with a single bit."""
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
    assert with_triton == {"kernels.py", "row_kernels.py", "block_kernels.py", "listening_kernels.py"}


class TestRefused:
    """Caches that kernels could not address, before anything is launched."""

    def refusal(self, caches: list[torch.Tensor], staging: torch.Tensor | None = None) -> str:
        pytest.importorskip("triton", reason="it is installed with vLLM on x86_64 only")
        from kvshare.vllm_connector.worker import kernels

        room = torch.empty(4096, dtype=torch.uint8) if staging is None else staging
        copy = StagedCopy(StagedPart(0, 4, 0, 1), Span(0, 4), np.arange(4))
        with pytest.raises(ValueError, match=r"\w+") as refused:
            kernels.gather(caches, room, [copy])
        return str(refused.value)

    def test_layers_of_different_forms(self) -> None:
        """All layers are addressed by the strides of the first."""
        caches = [torch.zeros(2, 2, 16, 32), torch.zeros(2, 16, 2, 32).transpose(1, 2)]
        assert self.refusal(caches) == "layer 1 has a cache of another form than layer 0"

    def test_rows_that_are_not_contiguous(self) -> None:
        """As in no layout that is read as K before V."""
        assert "cannot be addressed" in self.refusal([torch.zeros(2, 2, 32, 16).transpose(2, 3)])

    def test_elements_of_eight_bytes(self) -> None:
        """No cache has them."""
        assert "cannot be addressed" in self.refusal([torch.zeros(2, 2, 16, 32, dtype=torch.float64)])

    def test_memory_that_is_not_aligned(self) -> None:
        """The kernels read 16 bytes at once."""
        memory = torch.zeros(2 * 2 * 16 * 32 + 1)
        assert "multiple of 16" in self.refusal([memory[1:].view(2, 2, 16, 32)])
        staging = torch.empty(4097, dtype=torch.uint8)[1:]
        assert "not aligned" in self.refusal([memory[:-1].view(2, 2, 16, 32)], staging)


@pytest.mark.parametrize(
    "case",
    [
        ["float32", 2, 4, 0],
        ["float32", 2, 4, 3],
        ["float16", 3, 6, 1],
        ["uint8", 3, 3, 2],
        ["float8_e4m3fn", 2, 4, 1],
        ["float8_e5m2", 3, 6, 0],
    ],
)
def test_a_gpu_worker_with_our_kernels_does_what_a_cpu_worker_does(
    interpreted_copies: Ask, case: list[object]
) -> None:
    """Saves and loads of several segments, in batches of all or of some layers: bytes, sums, rotated rows."""
    assert not any(interpreted_copies({"case": case}).values())
