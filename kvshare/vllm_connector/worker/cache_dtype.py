"""
The dtype of vLLM's cache: that of the model, or 8 bits with a fixed scale for each layer or each head.

    stored x scale = the number         fp8, fp8_e4m3: float8_e4m3fn; fp8_e5m2: float8_e5m2

vLLM allocates a cache of 8 bits as bytes. Copies take the bytes as they are. A rotation does not need the
scale: both numbers of a pair have the same one, so  rotated(stored) x scale = rotated(stored x scale).

Alphabet: T tokens, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_OF_NAME = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of an element: to copy its bits
EIGHT_BITS = frozenset(_OF_NAME.values())
# Factor on a number that can be stored without rounding: it moves less than half a step away from zero. Then
# kernels that round to the nearest and kernels that cut off (vLLM 0.32 on a CPU) store the same byte.
_NUDGE = 1 + 2**-6


def stored_dtype(layer: Any) -> torch.dtype:
    """Return the dtype in which an attention module's cache stores numbers; its memory may be raw bytes."""
    memory: torch.dtype = layer.kv_cache.dtype
    if memory.itemsize != 1:
        return memory
    return _OF_NAME.get(getattr(layer, "kv_cache_dtype", ""), memory)


def scale_of(layer: Any, name: str) -> torch.Tensor:
    """Return the scale of a layer's "k" or "v", (1,) or (H,) float32, as vLLM's kernels read it."""
    scale = getattr(layer, f"_{name}_scale", None)
    return torch.ones(1) if scale is None else scale.detach().float().reshape(-1)


def as_numbers(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Convert stored rows to numbers, in float32. Shapes:  rows (..., H, D); scale (1,) or (H,)"""
    return rows.float() * scale.to(rows.device)[:, None]


def as_stored(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert numbers to stored rows, rounded to the nearest. Shapes:  as of `as_numbers`"""
    limits = torch.finfo(dtype)
    return (numbers.float() / scale.to(numbers.device)[:, None]).clamp(limits.min, limits.max).to(dtype)


def to_be_stored(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers that vLLM's kernels store as exactly these rows. Shapes:  as of `as_numbers`"""
    return (as_numbers(rows, scale) * _NUDGE).to(dtype)


def random_rows(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Make random stored rows. None of 8 bits is negative zero: vLLM's kernels store it without its sign."""
    rows = torch.randn(list(shape), generator=generator).to(dtype)
    return (rows.float() + 0.0).to(dtype) if dtype in EIGHT_BITS else rows


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare like `torch.equal`, which cannot compare numbers of 8 bits."""
    if one.dtype not in EIGHT_BITS or one.dtype != other.dtype:
        return torch.equal(one, other)
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def steps_apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how many steps of their dtype, 8 bits with a sign bit, each two numbers are apart."""
    codes = (each.contiguous().view(torch.uint8).int() for each in (one, other))
    here, there = ((code & 127) * (1 - 2 * (code >> 7)) for code in codes)
    return (here - there).abs()
