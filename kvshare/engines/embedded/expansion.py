"""
The cost of tokens that a pass only attends to.

Latent attention stores a compressed row for each token, and every pass expands all of them into keys and
values again. So the cost of a pass depends on its tokens and on its context. Hooks show which modules expand
rows.
"""

from __future__ import annotations

from typing import Any

import torch

from delta_tree import Span, token_ids
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass


def context_share(model: EmbeddedModel) -> float:
    """
    The cost of a token that is attended to, relative to one that is computed, without attention itself.

    It is the ratio of multiplications: those in modules that get all visible rows, over those for one
    computed token. It is 0 for a model that stores keys and values as it uses them.
    """
    tokens = token_ids(model.probe_tokens())
    last = Span(len(tokens) - 1, len(tokens))
    num_rows: dict[torch.nn.Linear, int] = {}

    def count(module: torch.nn.Linear, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        num_rows[module] = inputs[0].shape[:-1].numel()

    linear = [module for module in model.network.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_hook(count) for module in linear]
    try:
        model.compute(PartialPass(model.new_sequence(len(tokens)), (last,)), tokens[last.start :])
    finally:
        for hook in hooks:
            hook.remove()
    expanding = (module for module, rows in num_rows.items() if rows == len(tokens) > 1)
    of_context = sum(int(module.weight.numel()) for module in expanding)
    return of_context / max(1, _active_parameters(model.network) - of_context)


def _active_parameters(network: torch.nn.Module) -> int:
    """The number of weights that one token is multiplied with: of all experts, those it is routed to."""
    config: Any = network.config
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    num_experts = next((n for name in names if (n := getattr(config, name, None))), 1)
    used = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    return round(
        sum(
            weights.numel() * (used if ".experts." in name else 1)
            for name, weights in network.named_parameters()
            if weights.ndim > 1 and "embed" not in name
        )
    )
