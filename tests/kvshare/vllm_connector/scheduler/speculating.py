"""A configuration of vLLM's scheduler with speculative decoding."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def speculating(config: VllmConfig, num_drafts: int) -> VllmConfig:
    """The same, with a method that drafts so many tokens; 0: none."""
    from vllm.config import SpeculativeConfig

    changed = copy(config)
    if num_drafts:
        changed.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_drafts,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    return changed
