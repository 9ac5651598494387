"""
POST /v1/chat/completions, POST /v1/completions and POST /admin/explain.

1. read      the body, checked: `bodies`
2. tokenize  by the engine: a prompt becomes a `GenerationRequest`
3. run       in the engine; the answer is written as it comes: `chat_answer`, `completion_answer`
"""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from kvshare.conversation.chat import Chat
from kvshare.conversation.grammar import grammar_of
from kvshare.engines.base import GeneratingEngine
from kvshare.errors import ContextLengthError
from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.chat.chat_answer import ChatAnswer
from proxy.generate.chat.completion_answer import CompletionAnswer
from proxy.generate.chat_requests import chat_request
from proxy.generate.engine_key import ENGINE
from proxy.generate.requests import check_model, engine_requests
from proxy.generate.run import answer
from proxy.request_body import read_object, validated
from proxy.request_log import RECORD


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    return await answer(request, request.app[ENGINE], await _read_chat(request))


async def explain(request: web.Request) -> web.Response:
    """POST /admin/explain: the plan that this chat completion would get for the caller's own namespace."""
    (chat,) = (await _read_chat(request)).requests
    document = await request.app[ENGINE].explain(chat)
    return web.json_response({**document, "rules": request[RECORD].rules})


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    engine = request.app[ENGINE]
    body = validated(CompletionBody, await read_object(request))
    check_model(engine, body.model)
    grammar = grammar_of(Chat((), answer_schema=body.answer_schema), engine.tool_format)
    sampling = replace(body.sampling(), grammar=grammar)
    encoding = (
        engine.encode_text(entry) if isinstance(entry, str) else engine.encode_tokens(entry)
        for entry in body.prompt
    )
    requests = await engine_requests(request, engine, encoding, sampling, body.kvshare)
    echoed = await _prompt_texts(engine, body) if body.echo else ()
    written = CompletionAnswer(requests, body, model=engine.card.model_id, echoed=echoed)
    try:
        return await answer(request, engine, written)
    except ContextLengthError as exc:
        exc.param = "prompt"  # the class speaks of messages
        raise


async def _read_chat(request: web.Request) -> ChatAnswer:
    """A chat body and the engine's view of it, as the answer that is to be written."""
    engine = request.app[ENGINE]
    body = validated(ChatBody, await read_object(request))
    check_model(engine, body.model)
    asked = await chat_request(request, engine, body.chat(body.answer_schema), body.sampling(), body.kvshare)
    return ChatAnswer(asked, body, model=engine.card.model_id)


async def _prompt_texts(engine: GeneratingEngine, body: CompletionBody) -> list[str]:
    return [entry if isinstance(entry, str) else await engine.decode_tokens(entry) for entry in body.prompt]
