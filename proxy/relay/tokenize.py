"""
The prompt of a request, tokenized by vLLM's own `/tokenize`; or why the request cannot be planned.

An unusual request is not planned: vLLM gets it unchanged and reports what is wrong with it. A prompt that
vLLM tokenizes differently in the end does no harm: the ticket's digest does not match then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_tree import token_ids
from kvshare.fleet.engine import VllmEngine
from kvshare.requests import Prompt
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
_LONG_PROMPT = 20_000  # token ids; longer lists are converted off the event loop


@dataclass(frozen=True, slots=True)
class Unplannable:
    """Why a request is relayed without a plan; a fixed word, which is counted."""

    reason: str


async def chat_prompt(document: Mapping[str, Any], engine: VllmEngine) -> Prompt | Unplannable:
    """
    Of a body of POST /v1/chat/completions.

    Raises:  NoReplicaError, UpstreamError; DeltaTreeError, OverflowError for what are no tokens
    """
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return Unplannable("malformed")
    texts = [_text_of(message.get("content")) for message in messages]
    if None in texts:
        return Unplannable("multimodal")
    if (reason := _odd(document, engine)) is not None:
        return Unplannable(reason)
    body = {key: document[key] for key in _TEMPLATE_KEYS if document.get(key) is not None}
    if template_kwargs := _template_kwargs(document):
        body["chat_template_kwargs"] = template_kwargs
    known = [text or "" for text in texts]
    users = [text for text, message in zip(known, messages, strict=True) if message.get("role") == "user"]
    text = PromptText(last_user_turn=users[-1] if users else "", body="\n".join(known))
    return await _tokenized(body, text, engine)


async def completion_prompt(document: Mapping[str, Any], engine: VllmEngine) -> Prompt | Unplannable:
    """Of a body of POST /v1/completions; a list of one prompt counts as that prompt. Raises the same."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            return Unplannable("several_prompts")
        prompt = prompt[0]
    if document.get("prompt_embeds") is not None:
        return Unplannable("prompt_embeds")
    if document.get("suffix") is not None:
        return Unplannable("suffix")
    if (reason := _odd(document, engine)) is not None:
        return Unplannable(reason)
    if document.get("echo") and document.get("logprobs") is not None:
        return Unplannable("prompt_logprobs")
    if isinstance(prompt, str):
        body = {key: document[key] for key in _COMPLETION_KEYS if document.get(key) is not None}
        return await _tokenized({**body, "prompt": prompt}, PromptText("", body=prompt), engine)
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token <= _INT32 for token in prompt):
        return await _prompt_of(prompt, PromptText("", body=""))
    return Unplannable("malformed")


async def _tokenized(body: Mapping[str, Any], text: PromptText, engine: VllmEngine) -> Prompt:
    return await _prompt_of(await engine.server.router.tokenize(body), text)


async def _prompt_of(numbers: Sequence[int], text: PromptText) -> Prompt:
    if len(numbers) < _LONG_PROMPT:
        return Prompt(token_ids(np.asarray(numbers, dtype=np.int32)), text)
    array = await asyncio.to_thread(np.asarray, numbers, dtype=np.int32)
    return Prompt(token_ids(array), text)


def _odd(document: Mapping[str, Any], engine: VllmEngine) -> str | None:
    """Why vLLM would treat the prompt differently, or compute all of it; None if it would not."""
    model, served = document.get("model"), engine.fleet.models
    if model is not None and (served is None or model not in served.names):
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
