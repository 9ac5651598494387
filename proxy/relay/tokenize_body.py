"""
Builds the body for vLLM's `/tokenize` from a request, or says why the request cannot be planned.

An unusual request is not planned: vLLM gets it unchanged and reports what is wrong with it. A prompt that
vLLM tokenizes differently in the end does no harm: the ticket's digest does not match then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vector_index import PromptText

_INT32 = 2**31 - 1
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


@dataclass(frozen=True, slots=True)
class Unplannable:
    """Why a request is relayed without a plan; a fixed word, which is counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """The body for `/tokenize`, or the tokens themselves where the client sent tokens."""

    body: Mapping[str, Any]
    text: PromptText
    token_ids: tuple[int, ...] | None = None


def for_chat(document: Mapping[str, Any], models: Collection[str]) -> TokenizeBody | Unplannable:
    """For a body of POST /v1/chat/completions."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return Unplannable("malformed")
    texts = [_text_of(message.get("content")) for message in messages]
    if None in texts:
        return Unplannable("multimodal")
    if (reason := _odd(document, models)) is not None:
        return Unplannable(reason)
    body = {key: document[key] for key in _TEMPLATE_KEYS if document.get(key) is not None}
    if template_kwargs := _template_kwargs(document):
        body["chat_template_kwargs"] = template_kwargs
    known = [text or "" for text in texts]
    users = [text for text, message in zip(known, messages, strict=True) if message.get("role") == "user"]
    text = PromptText(last_user_turn=users[-1] if users else "", body="\n".join(known))
    return TokenizeBody(body, text)


def for_completion(document: Mapping[str, Any], models: Collection[str]) -> TokenizeBody | Unplannable:
    """For a body of POST /v1/completions. A list of one prompt counts as that prompt."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            return Unplannable("several_prompts")
        prompt = prompt[0]
    if document.get("prompt_embeds") is not None:
        return Unplannable("prompt_embeds")
    if document.get("suffix") is not None:
        return Unplannable("suffix")
    if (reason := _odd(document, models)) is not None:
        return Unplannable(reason)
    if document.get("echo") and document.get("logprobs") is not None:
        return Unplannable("prompt_logprobs")
    if isinstance(prompt, str):
        body = {key: document[key] for key in _COMPLETION_KEYS if document.get(key) is not None}
        return TokenizeBody({**body, "prompt": prompt}, PromptText(last_user_turn="", body=prompt))
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token <= _INT32 for token in prompt):
        return TokenizeBody({}, PromptText(last_user_turn="", body=""), tuple(prompt))
    return Unplannable("malformed")


def _odd(document: Mapping[str, Any], models: Collection[str]) -> str | None:
    """Why vLLM would treat the prompt differently, or compute all of it; None if it would not."""
    model = document.get("model")
    if model is not None and model not in models:
        return "adapter"  # or a model that is not there
    if document.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if document.get("truncate_prompt_tokens") is not None:
        return "truncated"
    if document.get("use_beam_search"):
        return "beam_search"
    return None


def _text_of(content: object) -> str | None:
    """The text of a message; None where it holds more than text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    parts = [_text_part(part) for part in content]
    return None if None in parts else "".join(part for part in parts if part is not None)


def _text_part(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


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
