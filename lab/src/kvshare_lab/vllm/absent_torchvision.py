"""
A name for torchvision where that is not installed. vLLM's multimodal models import it, text needs none of it.
A server gets it by a PYTHONPATH that begins with FOLDER.

Builds of torchvision on the package index want CUDA. Whatever is called in this one raises an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "torchvision"
FOLDER = Path(__file__).with_name("without_torchvision")
_BUDGETS = "vllm.multimodal.encoder_budget"


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


def add_name() -> bool:
    """Name it from now on, after transformers has noted that there is none. Returns whether it was absent."""
    from transformers.utils import is_torchvision_available  # type: ignore[attr-defined]  # it is there

    if importlib.util.find_spec(_NAME) is not None or is_torchvision_available():
        return False
    sys.meta_path.append(_Finder())
    return True


def name_torchvision() -> None:
    """Let vLLM import its multimodal models in this process."""
    from vllm.model_executor.models import registry
    from vllm.multimodal import encoder_budget

    if add_name():
        # vLLM looks at models in a process of its own, which has no such name.
        registry._run_in_subprocess = lambda look: look()
        _count_own_media_only(encoder_budget)


def name_in_this_server() -> None:
    """The same at the start of a process that will import vLLM."""
    if add_name():
        sys.meta_path.insert(0, _BudgetFinder())


class _BudgetFinder(importlib.abc.MetaPathFinder):
    """Changes vLLM's module of budgets as soon as it is imported."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != _BUDGETS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        own = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            own(module)
            _count_own_media_only(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _count_own_media_only(budgets: Any) -> None:
    """
    Have vLLM not ask what a medium takes of a model without a processor, which gets none.

    Most processors of images are transformers' and need torchvision.
    """
    own = budgets.get_mm_max_toks_per_item
    budgets.get_mm_max_toks_per_item = lambda processor, **named: (
        own(processor, **named) if _has_own(processor) else defaultdict(lambda: 1)
    )


def _has_own(processor: Any) -> bool:
    """Whether its model's folder has one."""
    return (Path(processor.info.ctx.model_config.model) / "processor_config.json").exists()
