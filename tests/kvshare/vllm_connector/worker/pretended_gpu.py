"""
A GPU that torch does not have: tensors that say they are on it are computed on the CPU, and what crosses
between it and the host is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.kvshare.vllm_connector.worker.closed_memory import ClosedMemory

CUDA = torch.device("cuda:0")
# What waits for a GPU because the host must know a value.
_WAITING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique")
_NO_LAUNCH = ("empty", "_unsafe_view")


class There(torch.Tensor):
    """Says that it is on the GPU. `here`: its elements."""

    here: torch.Tensor

    @staticmethod
    def holding(here: torch.Tensor) -> There:
        there: There = torch.Tensor._make_wrapper_subclass(
            There,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device("meta"),  # torch asks the driver about CUDA's own tensors
        )
        there.here = here
        return there

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is an attribute
        return CUDA

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]  # as torch calls it
        raise AssertionError(f"{func} outside of the mode")


@dataclass
class Crossings:
    """What went up to the GPU and down, in bytes each, and all that should not be."""

    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # of what loads and saves may ask of a GPU
    launches: int = 0  # of kernels and copies


class Gpu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Crossings()
        self.arenas: list[ClosedMemory] = []  # opened for copies to and from the GPU
        self._pinned: list[torch.Tensor] = []

    def register(self, buffer: torch.Tensor) -> None:
        self._pinned.append(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        flat, _ = tree_flatten((args, kwargs))
        given = [each for each in flat if isinstance(each, torch.Tensor)]
        wrapped = {id(each.here): each for each in given if isinstance(each, There)}
        target = next((each for each in flat if isinstance(each, torch.device)), None)
        is_there = bool(wrapped) if target is None else target == CUDA
        pins = kwargs.pop("pin_memory", None)
        if name in ("copy_", "to", "_to_copy"):
            self._note_copy(name, args, kwargs, is_there=is_there)
        elif wrapped and any(each.dim() and not isinstance(each, There) for each in given):
            self.seen.pageable.append(name)  # torch copies it silently
        if wrapped and name in _WAITING:
            self.seen.waits.append(name)
        args, kwargs = tree_map(_here, (args, kwargs))
        with ExitStack() as opened:
            if name == "copy_" and wrapped:
                for arena in self.arenas:
                    if any(each in arena for each in given if not isinstance(each, There)):
                        opened.enter_context(arena.opened())
            result = func(*args, **kwargs)
        if pins:
            self._pinned.append(result)
        if name in ("empty", "zeros") and is_there:
            self.seen.allocated.append(result.nbytes)
        self.seen.launches += is_there and not func.is_view and name not in _NO_LAUNCH

        def returned(each: Any) -> Any:
            if not isinstance(each, torch.Tensor) or not is_there:
                return each
            return wrapped.get(id(each)) if id(each) in wrapped else There.holding(each)

        return tree_map(returned, result)

    def _note_copy(self, name: str, args: Any, kwargs: Mapping[str, Any], *, is_there: bool) -> None:
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        goes_up = isinstance(target, There) if target is not None else is_there
        if isinstance(source, There) == goes_up:
            return
        (self.seen.up if goes_up else self.seen.down).append(source.nbytes)
        host = source if goes_up else target
        own = next((each for each in self._pinned if host is not None and _is_inside(host, each)), None)
        if own is None:
            self.seen.pageable.append(name)
        if not (kwargs.get("non_blocking") or True in args[2:]):
            self.seen.waits.append(name)


def _here(each: Any) -> Any:
    if isinstance(each, torch.device):
        return torch.device("cpu")
    return each.here if isinstance(each, There) else each


def _is_inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes
