"""
What CUDA kernels want of their arguments, said aloud: a GPU reads past a tensor's end where these raise.
"""

from __future__ import annotations

import torch


class Refused(AssertionError):
    """A kernel would not have taken this, or would have gone wrong with it."""


def demand(fulfilled: object, what: str) -> None:
    if not fulfilled:
        raise Refused(what)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """`reshape_and_cache_flash`: rows (T, H, D) into pages (B, N, H, D)."""
    demand(slots.dtype == torch.int64 and slots.is_contiguous(), "contiguous int64 slots")
    demand(len(slots) <= len(key) == len(value), "a row for every slot")
    demand(kv_cache_dtype == "auto", "KV is not quantised")
    demand(float(k_scale) == float(v_scale) == 1, "KV is not scaled")
    num_pages, page_size = key_cache.shape[:2]
    demand(bool(((slots >= 0) & (slots < num_pages * page_size)).all()), "slots that there are")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        demand(rows.dtype == cache.dtype and rows.stride(-1) == cache.stride(-1) == 1, "rows as in the cache")
        demand(rows.shape[1:] == cache.shape[2:], "heads as in the cache")
        cache[slots // page_size, slots % page_size] = rows[: len(slots)]
