"""Whether prompts with media can be shared, by the configuration of the model as vLLM reads it."""

from __future__ import annotations

import json
import re

from transformers import PretrainedConfig
from vllm.config import ModelConfig

from kvshare.vllm_connector.scheduler.media import MediaRules

# Fields of a model's configuration that hold the id of a token which marks the place of media.
_MEDIA_TOKEN = re.compile(
    r"(image|img|video|vision|visual|audio|speech|media|document|bo[ia]|eo[ia])_(\w+_)?token_(id|index)"
)


def media_rules(model: ModelConfig) -> MediaRules:
    """
    Return the rules of a model. Media are shared if they have the positions of their tokens, and attend only
    to earlier tokens.

    With M-RoPE, positions follow an image's rows and columns; in a model with a prefix of media, each part of
    an image attends to all of it. For such models only requests without media are shared.
    """
    plain = not (model.uses_mrope or model.is_mm_prefix_lm)
    return MediaRules(media_tokens(model), are_shared=model.is_multimodal_model and plain)


def media_settings(model: ModelConfig) -> str:
    """Return the operator's settings for media, which vLLM's digests do not contain; empty if none."""
    media = model.multimodal_config
    settings = [media.mm_processor_kwargs, media.media_io_kwargs] if media is not None else []
    return json.dumps(settings, sort_keys=True, default=str) if any(settings) else ""


def media_tokens(model: ModelConfig) -> frozenset[int]:
    """Return the ids of tokens that mark places of media, from a configuration and its parts."""
    tokens: set[int] = set()
    parts: list[PretrainedConfig] = [model.hf_config] if model.is_multimodal_model else []
    while parts:
        fields_of_part = vars(parts.pop())
        parts += (value for value in fields_of_part.values() if isinstance(value, PretrainedConfig))
        tokens.update(
            value
            for name, value in fields_of_part.items()
            if isinstance(value, int) and _MEDIA_TOKEN.fullmatch(name)
        )
    return frozenset(tokens)
