"""
The prompt of a request, tokenized by vLLM's own `/tokenize`; or why the request cannot be planned.

An unusual request is not planned: vLLM gets it unchanged and reports what is wrong with it. A prompt that
vLLM tokenizes differently in the end does no harm: the ticket's digest does not match then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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


class Unplannable(Exception):
    """Why a request is relayed without a plan; its text is a fixed word, which is counted."""


async def chat_prompt(document: Mapping[str, Any], engine: VllmEngine) -> Prompt:
    """
    Of a body of POST /v1/chat/completions.

    Raises:  Unplannable; NoReplicaError, UpstreamError; DeltaTreeError, OverflowError for what are no tokens
    """
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise Unplannable("malformed")
    texts = [_text_of(message.get("content")) for message in messages]
    _check_usual(document, engine)
    body = {key: document[key] for key in _TEMPLATE_KEYS if document.get(key) is not None}
    if template_kwargs := _template_kwargs(document):
        body["chat_template_kwargs"] = template_kwargs
    users = [text for text, message in zip(texts, messages, strict=True) if message.get("role") == "user"]
    text = PromptText(last_user_turn=users[-1] if users else "", body="\n".join(texts))
    return await _tokenized(body, text, engine)


async def completion_prompt(document: Mapping[str, Any], engine: VllmEngine) -> Prompt:
    """Of a body of POST /v1/completions; a list of one prompt counts as that prompt. Raises the same."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Unplannable("several_prompts")
        prompt = prompt[0]
    for name in ("prompt_embeds", "suffix"):
        if document.get(name) is not None:
            raise Unplannable(name)
    _check_usual(document, engine)
    if document.get("echo") and document.get("logprobs") is not None:
        raise Unplannable("prompt_logprobs")
    if isinstance(prompt, str):
        body = {key: document[key] for key in _COMPLETION_KEYS if document.get(key) is not None}
        return await _tokenized({**body, "prompt": prompt}, PromptText("", body=prompt), engine)
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token <= _INT32 for token in prompt):
        return await _prompt_of(prompt, PromptText("", body=""))
    raise Unplannable("malformed")


async def _tokenized(body: Mapping[str, Any], text: PromptText, engine: VllmEngine) -> Prompt:
    return await _prompt_of(await engine.server.router.tokenize(body), text)


async def _prompt_of(numbers: Sequence[int], text: PromptText) -> Prompt:
    if len(numbers) < _LONG_PROMPT:
        return Prompt(token_ids(np.asarray(numbers, dtype=np.int32)), text)
    array = await asyncio.to_thread(np.asarray, numbers, dtype=np.int32)
    return Prompt(token_ids(array), text)


def _check_usual(document: Mapping[str, Any], engine: VllmEngine) -> None:
    """Raises Unplannable where vLLM would treat the prompt differently, or compute all of it."""
    model, served = document.get("model"), engine.fleet.models
    if model is not None and (served is None or model not in served.names):
        raise Unplannable("adapter")  # or a model that is not there
    if document.get("prompt_logprobs") is not None:
        raise Unplannable("prompt_logprobs")
    if document.get("truncate_prompt_tokens") is not None:
        raise Unplannable("truncated")
    if document.get("use_beam_search"):
        raise Unplannable("beam_search")


def _text_of(content: object) -> str:
    """The text of a message. Raises Unplannable where it holds more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_text_part(part) for part in content] if isinstance(content, Sequence) else [content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise Unplannable("multimodal")
    return "".join(texts)


def _text_part(part: object) -> object:
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        return part.get("text")
    return part


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
