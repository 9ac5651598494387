"""
Parameters that this server does not implement and that would change the answer if it ignored them.

Each has the values that ask for nothing. Any other is refused with `unsupported_parameter`. What only hints
(`user`, `metadata`, `store`, `prompt_cache_key`, `service_tier`, `verbosity` ...) is not here and passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshare.errors import UnsupportedParameterError

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "modalities": (["text"],),
    **dict.fromkeys(("audio", "web_search_options"), ()),
    "suffix": ("",),
    # vLLM's additions
    "length_penalty": (1,),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("bad_words", "documents"), ([],)),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "logprob_token_ids", "chat_template"), ()),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_embeds"), ()),
}


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameterError for the first parameter of a body that asks for what is not there."""
    for name, accepted in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and not any(_same(value, entry) for entry in accepted):
            message = "this engine does not implement it; leave it out, or serve with `--engine vllm`"
            raise UnsupportedParameterError(name, message)


def _same(value: object, accepted: object) -> bool:
    """Whether two values are equal; true and 1 are not."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
