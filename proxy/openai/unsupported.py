"""
Parameters that this server does not implement and that would change the answer if it ignored them.

Each stands with the values that ask for nothing. Anything else is refused with `unsupported_parameter`: a
client that asked for JSON or tools must not take prose for them. What only hints (`user`, `metadata`,
`store`, `prompt_cache_key`, `service_tier` ...) is not here and passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvshare.errors import UnsupportedParameterError

_NEUTRAL: dict[str, tuple[object, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "echo": (False,),
    "suffix": ("",),
    # vLLM's additions
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

_NEUTRAL_IN_MESSAGE: dict[str, tuple[object, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


def refuse_unsupported(document: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameterError for the first parameter of a body that asks for what is not there."""
    _refuse(document, _NEUTRAL, at="")


def refuse_unsupported_in_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """The same for what may stand in a message beside its text."""
    for number, message in enumerate(messages):
        _refuse(message, _NEUTRAL_IN_MESSAGE, at=f"messages[{number}].")


def _refuse(document: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], *, at: str) -> None:
    for name, accepted in neutral.items():
        value = document.get(name)
        if value is not None and not any(_same(value, entry) for entry in accepted):
            raise UnsupportedParameterError(f"{at}{name}", "not implemented by this server")


def _same(value: object, accepted: object) -> bool:
    """Equal, with true and 1 kept apart."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
