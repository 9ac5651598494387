"""
What a pass pays for tokens that it only attends to.

Latent attention keeps a compressed row of each token and makes keys and values of all of them again in every
pass, so a pass costs by its tokens and by its context. Which modules do that is seen by calling the model.
"""

from __future__ import annotations

from typing import Any

import torch

from delta_tree import Span, token_ids
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass


def context_share(model: EmbeddedModel) -> float:
    """
    What a token that is attended to costs a pass, in units of one that is computed. Attention itself aside.

    Multiplications of the layers that were given all visible rows, over those that a token goes through; 0
    for a model that keeps keys and values as it uses them.
    """
    tokens = token_ids(model.probe_tokens())
    last = Span(len(tokens) - 1, len(tokens))
    given: dict[torch.nn.Linear, int] = {}

    def note(module: torch.nn.Linear, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        given[module] = inputs[0].shape[:-1].numel()

    linear = [module for module in model.network.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_hook(note) for module in linear]
    try:
        model.compute(PartialPass(model.new_sequence(len(tokens)), (last,)), tokens[last.start :])
    finally:
        for hook in hooks:
            hook.remove()
    expanding = (module for module, rows in given.items() if rows == len(tokens) > 1)
    of_context = sum(int(module.weight.numel()) for module in expanding)
    return of_context / max(1, _active_parameters(model.network) - of_context)


def _active_parameters(network: torch.nn.Module) -> int:
    """Those that one token goes through: of experts as many as it is sent to."""
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
