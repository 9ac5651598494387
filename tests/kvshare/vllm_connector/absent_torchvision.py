"""
A name for torchvision where that is not installed. vLLM's multimodal models import it, text needs none of it.

Builds of torchvision on the package index want CUDA. Whatever is called in this one raises an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

_NAME = "torchvision"


class _Absent:
    """Anything of torchvision. It may be looked up, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{self._name} was called, but torchvision is not installed")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and each module in it."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != _NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has nothing."""


def name_torchvision() -> None:
    """Let vLLM import its multimodal models. transformers has noted before that there is no torchvision."""
    from transformers.utils import is_torchvision_available  # type: ignore[attr-defined]  # it is there
    from vllm.model_executor.models import registry
    from vllm.multimodal import encoder_budget

    if importlib.util.find_spec(_NAME) is None and not is_torchvision_available():
        sys.meta_path.append(_Finder())
        # vLLM looks at models in a process of its own, which has no such name.
        registry._run_in_subprocess = lambda look: look()
        # Processors of images and videos are transformers', which need torchvision; no test has media.
        encoder_budget.get_mm_max_toks_per_item = lambda *_, **__: defaultdict(lambda: 1)
