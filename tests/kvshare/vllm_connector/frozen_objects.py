"""Python's garbage collector, where several vLLMs start in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def frozen() -> Iterator[None]:
    """
    A vLLM starts or ends inside, which does not change what the collector looks at.

    vLLM has all objects looked at three times when it starts and twice when it ends, which took most of
    both: modules, mostly. Who freezes those before a start has vLLM look at its own objects only.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield
