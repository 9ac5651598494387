"""POST /v1/messages and POST /v1/messages/count_tokens"""

from __future__ import annotations

from aiohttp import web

from kvshare.errors import ContextLengthError, RequestError
from proxy.generate.chat_requests import chat_request
from proxy.generate.engine_key import ENGINE
from proxy.generate.messages.answers import MessageAnswer
from proxy.generate.messages.bodies import CountTokensBody, MessagesBody
from proxy.generate.requests import check_model
from proxy.generate.run import answer
from proxy.request_body import read_object, validated
from proxy.request_log import RECORD


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages"""
    engine = request.app[ENGINE]
    body = validated(MessagesBody, await read_object(request))
    check_model(engine, body.model)
    try:
        asked = await chat_request(request, engine, body.chat, body.sampling, body.kvshare)
        written = MessageAnswer(
            asked.generation,
            asked.new_parser(),
            model=engine.card.model_id,
            is_stream=body.stream,
            client_request_id=request[RECORD].request_id,
        )
        return await answer(request, engine, written)
    except ContextLengthError as exc:
        raise RequestError(_too_long(exc)) from exc


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: of the prompt that this body becomes, its template included."""
    engine = request.app[ENGINE]
    body = validated(CountTokensBody, await read_object(request))
    check_model(engine, body.model)
    prompt = await engine.encode_chat(body.chat)
    return web.json_response({"input_tokens": prompt.num_tokens})


def _too_long(exc: ContextLengthError) -> str:
    """In Anthropic's words, by which coding agents decide what to make shorter."""
    num_prompt, limit = exc.num_prompt_tokens, exc.max_model_len
    if num_prompt >= limit:
        return f"prompt is too long: {num_prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {exc.max_tokens} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )
