"""
What to ask of vLLM's `/tokenize`, for a vLLM that was started without its `/render` routes.

`/tokenize` reads a chat or a plain prompt, and of those not all that their own routes read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshare.reasons import Reason
from proxy.relay.dialects import CHAT, COMPLETION, Dialect, Unplannable, only_prompt

_TEMPLATE_KEYS = (  # of a chat body, that `/tokenize` reads alike
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
_COMPLETION_KEYS = ("model", "add_special_tokens")


def tokenize_body(document: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Of the same prompt. Raises Unplannable where `/tokenize` cannot be asked for it."""
    if dialect not in (CHAT, COMPLETION):
        raise Unplannable(Reason.NO_RENDER)
    if document.get("truncate_prompt_tokens") is not None:
        raise Unplannable(Reason.TRUNCATED)
    keys = _TEMPLATE_KEYS if dialect is CHAT else _COMPLETION_KEYS
    body = {key: document[key] for key in keys if document.get(key) is not None}
    if dialect is COMPLETION:
        return {**body, "prompt": only_prompt(document)}
    if template_kwargs := _template_kwargs(document):
        body["chat_template_kwargs"] = template_kwargs
    return body


def _template_kwargs(document: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` with what the chat route adds to it and `/tokenize` does not."""
    given = document.get("chat_template_kwargs")
    kwargs = dict(given) if isinstance(given, Mapping) else {}
    effort = document.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in kwargs:
        kwargs["enable_thinking"] = effort != "none"
    for name in ("documents", "reasoning_effort"):
        if document.get(name) not in (None, "auto"):
            kwargs[name] = document[name]
    return kwargs
