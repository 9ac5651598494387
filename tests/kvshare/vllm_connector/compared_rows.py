"""Rows of a request's prompt in real vLLM's cache, and how far those of two requests are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_tree import Span
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_protocol.messages import WireCopy
    from tests.kvshare.vllm_connector.in_process_vllm import Vllm

    Rows = list[list[torch.Tensor]]


def rows_of(vllm: Vllm, tokens: list[int], copies: list[WireCopy] | None = None, **fields: Any) -> Rows:
    """K and V (T, H, D) of each layer when the prompt is computed; with no copies, in full."""
    ticket = vllm.ticket(tokens, copies or (), store=False, **fields)
    name = vllm.begin(tokens, ticket, salt=private_salt(ticket.ticket_id), max_tokens=8)
    engine = vllm.llm.llm_engine
    while not (request := running(vllm, name)).num_output_tokens:
        engine.step()
    (block_ids,) = vllm.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    cache = vllm.worker.attached.cache
    planes = cache.read(tuple(block_ids), Span(0, len(tokens))).planes
    numbers = range(cache.kv_layout.num_layers)
    rows = [[rows.clone() for rows in cache.kv_layout.of_layer(planes, number)] for number in numbers]
    while engine.has_unfinished_requests():
        engine.step()
    vllm.settle()
    assert vllm.finished(ticket).decision == ("approx" if copies else "full")
    return rows


def running(vllm: Vllm, name: str) -> Any:
    """vLLM's request of this name, to which it may have added something."""
    requests = vllm.scheduler.requests.items()
    (found,) = (request for each, request in requests if each == name or each.startswith(f"{name}-"))
    return found


def errors(expected: Rows, got: Rows) -> torch.Tensor:
    """(L, T) The largest difference of each row of each layer, up to where the shorter prompt ends."""
    import torch

    length = min(len(expected[0][0]), len(got[0][0]))
    layers = []
    for right, own in zip(expected, got, strict=True):
        both = zip(right, own, strict=True)
        k, v = ((a[:length] - b[:length]).abs().amax(dim=(1, 2)) for a, b in both)
        layers.append(k.maximum(v))
    return torch.stack(layers)
