"""Stand-ins of vLLM's Triton kernels on a CPU, where several vLLMs start in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_has_started = False


@contextmanager
def registered_once() -> Iterator[None]:
    """
    A vLLM starts inside. One that is not the first finds the stand-ins registered.

    vLLM 0.32 registers them at each start, and looks through all modules for what they replace, which takes
    time; every call of one passes through those of all starts. With numba, which drafts from the text load,
    it finds an object that has attributes of any name, and fails.
    """
    global _has_started
    from vllm.platforms.cpu import CpuPlatform

    with pytest.MonkeyPatch.context() as patch:
        if _has_started:
            patch.setattr(CpuPlatform, "register_triton_kernel_overrides", classmethod(lambda _: None))
        yield
    _has_started = True
