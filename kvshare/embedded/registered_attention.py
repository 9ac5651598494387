"""
Connects an unmodified model of transformers to KVShare by a cache object whose `update` writes into the
slots of a sequence, and a registered attention function that calls `PartialPass.attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from kvshare.errors import UnshareableError
from kvshare.kv.attention import PartialPass
from kvshare.kv.layout import ALL_EARLIER, PLAIN, AttentionForm, Reach

ATTENTION = "kvshare_partial"
_UNSUPPORTED_ARGUMENTS = ("position_bias", "head_mask")  # arguments of attention in some models


class SlotCache(Cache):
    """A cache for transformers whose `update` writes new rows into the slots and returns all visible KV."""

    def __init__(self, current: PartialPass) -> None:
        super().__init__(layers=[])
        self.current = current

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.current.store(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.current.num_visible

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.current.num_visible, 0


def _reach(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Reach:
    """
    Return the reach of one kind of layer. transformers expects a mask here, and passes it to `_attend`.

    `EmbeddedModel` verifies that it is right, by comparing logits.
    """
    if local_size is None:
        return ALL_EARLIER
    # With a window, the token at position `local_size` sees the one at 1; with chunks, it does not.
    sees = mask_function(0, 0, torch.tensor(local_size), torch.tensor(1))
    return Reach(local_size, is_chunked=not bool(sees))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Reach | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    partial_pass: PartialPass,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers. `attention_mask` is not a mask, but the result of `_reach`."""
    if found := [name for name in _UNSUPPORTED_ARGUMENTS if extras.get(name) is not None]:
        raise UnshareableError(f"attention with {', '.join(found)} is not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # transformers sets an int
    is_plain = attention_mask in (None, ALL_EARLIER) and softcap is None and s_aux is None
    form = PLAIN if is_plain else AttentionForm(attention_mask or ALL_EARLIER, softcap, s_aux)
    partial_pass.forms[layer] = form
    output = partial_pass.attend(layer, query, key, value, scaling=scaling, form=form)
    return output.transpose(1, 2).contiguous(), None  # (1, N, H_q, D)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _reach)
