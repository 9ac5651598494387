"""Async scheduling on a CPU, where vLLM turns it off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def one_step_ahead(wanted: bool) -> Iterator[None]:
    """
    Async scheduling, which vLLM turns off on CPUs: scheduler and engine core do it here, too.

    The model runner stays synchronous. What is in flight is what has run, but not been heard of.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    check, init = CpuPlatform.check_and_update_config, GPUModelRunner.__init__

    def check_and_turn_on(cls: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = wanted

    def init_synchronous(runner: Any, config: Any, *args: Any, **options: Any) -> None:
        config.scheduler_config.async_scheduling = False
        init(runner, config, *args, **options)
        config.scheduler_config.async_scheduling = wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_turn_on))
        patch.setattr(GPUModelRunner, "__init__", init_synchronous)
        yield
