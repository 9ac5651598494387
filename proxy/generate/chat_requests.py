"""From a `Chat`, whichever API it came by, to what the engine runs and what reads its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web

from kvshare.conversation.chat import Chat
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.parser import AnswerParser, parser_for
from kvshare.engines.base import GeneratingEngine, GenerationRequest, SamplingParams
from proxy.generate.requests import engine_requests
from proxy.request_options import KVShareObject


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat as the engine sees it; each of its choices is read by a parser of its own."""

    generation: GenerationRequest
    new_parser: Callable[[], AnswerParser]
    is_plain: bool  # nothing may be called, and the prompt does not end inside of thoughts


async def chat_request(
    request: web.Request,
    engine: GeneratingEngine,
    chat: Chat,
    sampling: SamplingParams,
    kvshare: KVShareObject | None,
) -> ChatRequest:
    """Raises RequestError if the template refuses the chat, or nothing can follow its schemas."""
    fmt = engine.tool_format
    (generation,) = await engine_requests(request, engine, [engine.encode_chat(chat)], sampling, kvshare)
    reasons = generation.prompt.text.body.rstrip().endswith("<think>")
    sampling = replace(
        sampling,
        grammar=grammar_of(chat, fmt, added_tokens=engine.added_tokens, reasons=reasons),
        # Some models' calls begin with a special token.
        skip_special_tokens=sampling.skip_special_tokens and not chat.may_call,
    )
    return ChatRequest(
        replace(generation, sampling=sampling),
        partial(parser_for, chat, fmt, reasons=reasons),
        is_plain=not chat.may_call and not reasons,
    )
