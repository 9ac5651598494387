"""Models whose classes vLLM looks at in this process, where it starts another one for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def inspected_here() -> Iterator[None]:
    """
    A vLLM starts inside.

    Before a model's first start vLLM asks another process for what its class can do, lest this one touch a
    GPU, and keeps the answer in a cache, which a new machine has not. That process imports all of vLLM.
    """
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield
