"""
The budget of tokens that loads may compute in one step. Other loads wait for later steps, in order.

vLLM's own token budget does not count what the connector computes: without this one, fifty planned requests
would be computed in the same step, and all running answers would wait.
"""

from __future__ import annotations

from collections.abc import Iterable


def num_admitted(sizes: Iterable[int], max_tokens: int, *, num_tokens: int = 0) -> int:
    """
    How many of the first loads, of these sizes in tokens, fit a step that computes `num_tokens` anyway. If
    those are none, the first of any size does: the worker computes only a part of it, if it is too large.
    """
    num_loads = 0
    for size in sizes:
        if size and num_tokens and num_tokens + size > max_tokens:
            break
        num_loads += 1
        num_tokens += size
    return num_loads
