"""
The budget of tokens that loads may compute in one step. Other loads wait for later steps, in order.

vLLM's own token budget does not count what the connector computes: without this budget, fifty planned
requests would be computed in the same step, and all running answers would wait.
"""

from __future__ import annotations

from collections.abc import Iterable


def num_admitted(sizes: Iterable[int], max_tokens: int, *, num_tokens: int = 0) -> int:
    """
    Return how many of the first loads fit a step that computes `num_tokens` anyway. `sizes`: in tokens.

    If `num_tokens` is 0, the first load always fits: if it is too large, the worker computes a part of it.
    """
    num_loads = 0
    for size in sizes:
        if size and num_tokens and num_tokens + size > max_tokens:
            break
        num_loads += 1
        num_tokens += size
    return num_loads
