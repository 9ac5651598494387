"""
What the fixture `interpreted_copies` starts: saves and loads of a GPU worker with our kernels, in Triton's
interpreter, compared with those of a CPU worker. Each line of stdin has the arguments of `differences`.

A process of its own, with TRITON_INTERPRET=1: Triton looks at it once, when imported.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

from kvshare.vllm_connector.worker import block_kernels, kernels
from tests.kvshare.vllm_connector.without_gpu.interpreted_kernels import prepare
from tests.kvshare.vllm_connector.worker.copy_case import differences


def main() -> None:
    prepare()
    kernels.COPYING_TILES = 3  # several launches
    for line in sys.stdin:
        try:
            dtype, heads, dim, num_fitting = json.loads(line)["case"]
            with torch.inference_mode():
                answer: object = differences(dtype, heads, dim, num_fitting, kernels, block_kernels)
        except Exception:  # noqa: BLE001  the test shows it
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
