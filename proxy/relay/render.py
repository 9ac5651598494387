"""
The prompt of a request in tokens, as vLLM renders the very body; or why the request cannot be planned. A vLLM
that was started without its `/render` routes is asked by `/tokenize`, which reads less.

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
from kvshare.reasons import Reason
from kvshare.requests import Prompt
from proxy.relay.dialects import CHAT, COMPLETION, Dialect, Unplannable, only_prompt

_INT32 = 2**31 - 1
_LONG_PROMPT = 20_000  # token ids; longer lists are converted off the event loop

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


async def prompt_of(
    document: Mapping[str, Any], body: bytes, *, dialect: Dialect, engine: VllmEngine
) -> Prompt:
    """
    Of a request, given as values and as the bytes that vLLM will get, sanitized.

    Raises:  Unplannable; NoReplicaError, UpstreamError; DeltaTreeError, OverflowError for what are no tokens
    """
    text = dialect.text_of(document)
    _check_usual(document, engine)
    given = _given_tokens(document) if dialect is COMPLETION else None
    numbers = await _rendered(document, body, dialect, engine) if given is None else given
    if len(numbers) < _LONG_PROMPT:
        return Prompt(token_ids(np.asarray(numbers, dtype=np.int32)), text)
    array = await asyncio.to_thread(np.asarray, numbers, dtype=np.int32)
    return Prompt(token_ids(array), text)


async def _rendered(
    document: Mapping[str, Any], body: bytes, dialect: Dialect, engine: VllmEngine
) -> Sequence[int]:
    router = engine.server.router
    rendered = await router.render(dialect.path, body)
    if rendered is None:
        return await router.tokenize(_tokenize_body(document, dialect))
    if len(rendered) != 1:
        raise Unplannable(Reason.SEVERAL_PROMPTS)
    if not rendered[0].is_text:
        raise Unplannable(Reason.MULTIMODAL)
    return rendered[0].token_ids


def _given_tokens(document: Mapping[str, Any]) -> list[int] | None:
    """A prompt that comes as tokens needs no rendering, unless it is to be cut. Raises Unplannable."""
    prompt = only_prompt(document)
    if isinstance(prompt, str) or document.get("truncate_prompt_tokens") is not None:
        return None
    if not all(type(token) is int and 0 <= token <= _INT32 for token in prompt):
        raise Unplannable(Reason.MALFORMED)
    return prompt


def _check_usual(document: Mapping[str, Any], engine: VllmEngine) -> None:
    """Raises Unplannable where the KV is not the base model's, or vLLM computes all of it anyway."""
    model, served = document.get("model"), engine.fleet.models
    if model is not None and (served is None or model not in served.names):
        raise Unplannable(Reason.ADAPTER)  # or a model that is not there
    if document.get("prompt_logprobs") is not None:
        raise Unplannable(Reason.PROMPT_LOGPROBS)
    if document.get("use_beam_search"):
        raise Unplannable(Reason.BEAM_SEARCH)


def _tokenize_body(document: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """What to ask of vLLM's `/tokenize`, which reads chats and plain prompts only. Raises Unplannable."""
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
