"""
Speculative decoding: what vLLM's drafts are made from, and whether KV is shared while it is on.

    drafts from       methods                     what a copied position needs besides the target's KV
    text              ngram, suffix               nothing
    a model's own KV  draft_model                 the rows of the draft's layers: saved, moved and computed as
                                                  the target's are, since they have slots in the same blocks
    hidden states     EAGLE, MTP                  the rows of the head's layer, in the same way; the pass
                                                  gives it the target's hidden states of what is computed
    the target's KV   MTP of Gemma 4              nothing: its layers have no KV of their own
    hidden states     Medusa, others              as EAGLE, which was not tested: requests pass unshared

A head that attends to rows that were never computed proposes tokens that are rejected, and the answer takes
more steps than sharing has saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FROM_TEXT = ("ngram", "ngram_gpu", "suffix")
_BY_MODEL = "draft_model"
_WITHOUT_ROWS = {"Gemma4MTPModel"}  # it attends to the target's last layers, from the last position only
_HEADS = {  # the architectures that were tested, by method
    "eagle": {"EagleLlamaForCausalLM"},
    "eagle3": {"Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"},
    "mtp": {"ErnieMTPModel", "Glm4MoeMTPModel", "HYV3MTPModel"},
}


def method_of(config: VllmConfig) -> str:
    """Return the method's name in vLLM; empty where speculative decoding is off."""
    speculative = config.speculative_config
    return "" if speculative is None else str(speculative.method)


def drafts_by_head(config: VllmConfig) -> bool:
    """Return whether its drafts come from the target's hidden states, by a head whose rows can be shared."""
    return method_of(config) in _HEADS and not _is_without_rows(config)


def _is_without_rows(config: VllmConfig) -> bool:
    return method_of(config) == "mtp" and set(_kinds(config)) <= _WITHOUT_ROWS


def _kinds(config: VllmConfig) -> Sequence[str]:
    """Return the architectures of what drafts."""
    kinds: Sequence[str] = config.speculative_config.draft_model_config.architectures
    return kinds


def has_rows(config: VllmConfig) -> bool:
    """Return whether what drafts has KV of its own that is shared."""
    return method_of(config) == _BY_MODEL or drafts_by_head(config)


def drafts_after_report(config: VllmConfig) -> bool:
    """
    Return whether rows of a step may still be written when vLLM counts the step as done.

    Model runner V2 sends a step's output before it drafts. Runner V1 drafts first.
    """
    return has_rows(config) and bool(config.use_v2_model_runner)


def why_unshared(config: VllmConfig) -> str | None:
    """Return why requests pass unshared with this method, and what to change; None if they need not."""
    method = method_of(config)
    if not method or method in _FROM_TEXT or _is_without_rows(config):
        return None
    if not has_rows(config):
        return (
            f"speculative decoding by {method} drafts from the target's hidden states, and was not tested "
            "with copied text (ngram, suffix, draft_model, and some heads of eagle, eagle3 and mtp were)"
        )
    limits = [*_limits_of_head(config), *_limits_of_model(config)]
    return f"the KV of what drafts is not shared: {'; '.join(limits)}" if limits else None


def passing_unverified(config: VllmConfig, problem: str) -> str:
    """Say that requests pass unshared as the self-test found a `problem` with what drafts, and what to do."""
    is_v2 = bool(config.use_v2_model_runner)
    runners = "V2 (VLLM_USE_V2_MODEL_RUNNER=0 selects V1)" if is_v2 else "V1"
    return (
        f"the self-test did not verify the KV of what drafts ({method_of(config)}) under model runner "
        f"{runners}: {problem}; to share, start vLLM without --speculative-config, and please report this"
    )


def _limits_of_head(config: VllmConfig) -> Sequence[str]:
    if not drafts_by_head(config):
        return ()
    draft = config.speculative_config.draft_model_config
    untested = sorted(set(_kinds(config)) - _HEADS[method_of(config)])
    num_layers = getattr(draft.hf_config, "n_predict", None) or 1
    checks = {
        f"heads of this kind were not tested ({', '.join(untested)})": bool(untested),
        f"{num_layers} layers draft one after the other, which was not tested": num_layers > 1,
    }
    return [message for message, applies in checks.items() if applies]


def _limits_of_model(config: VllmConfig) -> Sequence[str]:
    speculative, target = config.speculative_config, config.model_config
    draft = speculative.draft_model_config
    checks = {
        "its vocabulary is another one (use_heterogeneous_vocab)": bool(speculative.use_heterogeneous_vocab),
        "it drafts in parallel (parallel_drafting), which was not tested": bool(
            speculative.parallel_drafting
        ),
        "models that take media were not tested with one": bool(
            target.is_multimodal_model or draft.is_multimodal_model
        ),
        f"it takes {draft.max_model_len} tokens, and the target {target.max_model_len} (set max_model_len of "
        "speculative_config and of vLLM to the same)": draft.max_model_len < target.max_model_len,
    }
    return [message for message, applies in checks.items() if applies]


def draft_model_of(runner: Any) -> torch.nn.Module | None:
    """Return the model that drafts, of either of vLLM's model runners; None where it has none."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    return model if isinstance(model, torch.nn.Module) else None
