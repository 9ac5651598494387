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


async def chat_request(
    request: web.Request,
    engine: GeneratingEngine,
    chat: Chat,
    sampling: SamplingParams,
    kvshare: KVShareObject | None,
) -> ChatRequest:
    """Raises RequestError if the template refuses the chat, or nothing can follow its schemas."""
    # Some models' calls begin with a special token.
    sampling = replace(
        sampling, grammar=grammar_of(chat, engine.tool_format), skip_special_tokens=not chat.may_call
    )
    (generation,) = await engine_requests(request, engine, [engine.encode_chat(chat)], sampling, kvshare)
    reasons = generation.prompt.text.body.rstrip().endswith("<think>")
    return ChatRequest(generation, partial(parser_for, chat, engine.tool_format, reasons=reasons))
