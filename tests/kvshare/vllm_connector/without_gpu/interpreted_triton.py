"""
What the fixture `interpreter` starts: vLLM's Triton kernels in Triton's interpreter. Each line of stdin is
what to try, and for each there is one on stdout with what came of it.

A process of its own, with TRITON_INTERPRET=1: Triton and vLLM look at the machine once, when imported.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.backends
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot = InterpreterBuilder.create_dot


def prepare() -> None:
    """Before vLLM is imported."""
    # A CPU build of vLLM uses Triton only if that has a backend for CPUs. The interpreter needs none.
    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # an H100's; the writing kernel's launcher asks
    InterpreterBuilder.create_dot = _dot_of_bfloat16


def _dot_of_bfloat16(builder: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    """Triton 3.7's interpreter holds bfloat16 as 16 bits, and its `tl.dot` multiplies these as integers."""
    return _create_dot(builder, *map(_as_float32, (a, b)), *rest)


def _as_float32(number: TensorHandle) -> TensorHandle:
    """The upper half of a float32's bits are a bfloat16's."""
    if number.dtype.scalar != tl.bfloat16:
        return number
    return TensorHandle((number.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def main(folder: Path) -> None:
    prepare()
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from tests.kvshare.vllm_connector.without_gpu.attention_model import Case, Setting
    from tests.kvshare.vllm_connector.without_gpu.flashinfer_kernels import FlashInferBackend, planned
    from tests.kvshare.vllm_connector.without_gpu.scattered_runs import FAULTS, LONG, SINGLE, try_out

    assert HAS_TRITON
    backends = {"triton": TritonAttentionBackend, "flashinfer": FlashInferBackend}
    for line in sys.stdin:
        asked = json.loads(line)
        planned.clear()
        try:
            setting = Setting(Case(**asked["case"]), backends[asked["backend"]], folder)
            outcome = try_out(setting, SINGLE if asked["single"] else LONG, FAULTS[asked["fault"]])
            answer = {**asdict(outcome), "planned": planned}
        except Exception:  # noqa: BLE001  the test that asked fails with it
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
