"""Hooks in each layer of a pass: before the layer's cache is used, and after its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Watch = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with a layer's number, and the queries and outputs of its attention in a pass, (N, H_q, D) each."""

_WRAPPED = ("forward", "do_kv_cache_update")


class PassEndedError(Exception):
    """A pass needs no more layers. vLLM's model is left in the middle."""


def ending(watch: Watch | None, num_layers: int) -> Watch:
    """Return a watch that ends the pass, by PassEndedError, when so many layers have written the cache."""

    def watch_or_end(layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
        if watch is not None:
            watch(layer, query, output)
        if layer + 1 == num_layers:
            raise PassEndedError

    return watch_or_end


@contextmanager
def hooked(
    impls: Sequence[Any],
    await_layer: Callable[[int], None] | None,
    watch: Watch | None,
    *,
    num_tokens: int | None = None,
) -> Iterator[None]:
    """
    Wrap the kernels of all layers that write the cache and attend to it; some backends have one for both.

    This works with compiled models, because vLLM calls kernels through opaque operators. `await_layer` is
    called once for each layer, before its cache is read or written; `watch` is called after its attention,
    when the cache has been written. `num_tokens`: rows of the pass; a graph has more.
    """
    begun = set[int]()

    def begin(index: int) -> None:
        if await_layer is not None and index not in begun:
            begun.add(index)
            await_layer(index)

    def writing(index: int, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def update(*given: Any, **options: Any) -> Any:
            begin(index)
            return kernel(*given, **options)

        return update

    def attending(index: int, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: torch.Tensor, *rest: Any, output: torch.Tensor, **options: Any) -> Any:
            begin(index)
            result = kernel(layer, query, *rest, output=output, **options)
            if watch is not None:
                watch(index, query[:num_tokens], output.view_as(query)[:num_tokens])
            return result

        return forward

    before = [vars(impl).copy() for impl in impls]
    for index, impl in enumerate(impls):
        impl.forward = attending(index, impl.forward)
        if await_layer is not None:
            impl.do_kv_cache_update = writing(index, impl.do_kv_cache_update)
    try:
        yield
    finally:
        for impl, methods in zip(impls, before, strict=True):  # the methods from before are in effect again
            for name in _WRAPPED:
                vars(impl).pop(name, None)
            vars(impl).update({name: methods[name] for name in _WRAPPED if name in methods})
