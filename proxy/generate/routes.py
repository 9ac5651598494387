"""
The routes of an engine that generates here. What all four APIs do with a request that generates:

1. read      the body, checked: `bodies` of each API
2. tokenize  by the engine: a prompt becomes a `GenerationRequest`, see `requests.py`
3. run       in the engine; the answer is written as it comes, by an `Answer` of the API, see `run.py`

`/admin/explain` stops before the third.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from aiohttp import web

import kvshare
from kvshare.conversation.chat import Chat
from kvshare.conversation.grammar import grammar_of
from kvshare.engines.base import GeneratingEngine
from kvshare.errors import ContextLengthError, ErrorCode, RequestError
from proxy.errors import HttpError
from proxy.generate.answer import Answer
from proxy.generate.chat.answers import CompletionAnswer
from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.chat.chat_answer import ChatAnswer
from proxy.generate.embeddings import embeddings
from proxy.generate.messages.answers import MessageAnswer
from proxy.generate.messages.bodies import CountTokensBody, MessagesBody
from proxy.generate.requests import ENGINE, chat_request, check_model, engine_requests, read_body
from proxy.generate.responses.answers import ResponseAnswer
from proxy.generate.responses.bodies import ResponsesBody
from proxy.generate.run import answer
from proxy.generate.tokenization import detokenize, tokenize
from proxy.prompt_rules import api_of
from proxy.request_log import RECORD
from proxy.wrong_values import invalid

_STORED_RESPONSE = (
    "This server stores no responses, so that none can be read, deleted or continued: "
    "keep what you get, and send the whole conversation as 'input' of POST /v1/responses."
)


def add_routes(
    app: web.Application, engine: GeneratingEngine, *, serves_clients: bool, serves_admins: bool
) -> None:
    """All of /v1 for clients, `/admin/explain` for admins, and for both the list of models."""
    app[ENGINE] = engine
    app.router.add_get("/v1/models", models)
    if serves_clients:
        app.router.add_get("/v1/models/{model:.+}", model)
        for path in _READERS:
            app.router.add_post(path, generate)
        app.router.add_route("*", "/v1/responses/{path:.+}", stored_response)
        app.router.add_post("/v1/messages/count_tokens", count_tokens)
        app.router.add_post("/v1/embeddings", embeddings)
        app.router.add_post("/tokenize", tokenize)
        app.router.add_post("/detokenize", detokenize)
        app.router.add_get("/version", version)
    if serves_admins:
        app.router.add_post("/admin/explain", explain)


async def generate(request: web.Request) -> web.StreamResponse:
    """POST to a route of `_READERS`."""
    path = api_of(request)
    try:
        return await answer(request, request.app[ENGINE], await _READERS[path](request))
    except ContextLengthError as exc:
        if path == "/v1/messages":
            raise RequestError(_too_long(exc)) from exc
        exc.param = _PROMPT_AT[path]
        raise


async def explain(request: web.Request) -> web.Response:
    """POST /admin/explain: the plan that this request would get for the caller's own namespace."""
    requests = (await _READERS[api_of(request)](request)).requests
    if len(requests) != 1:
        raise invalid("prompt", f"expected one prompt, got {len(requests)}")
    document = await request.app[ENGINE].explain(requests[0])
    return web.json_response({**document, "rules": request[RECORD].rules})


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: of the prompt that this body becomes, its template included."""
    body = await read_body(request, CountTokensBody)
    prompt = await request.app[ENGINE].encode_chat(body.chat)
    return web.json_response({"input_tokens": prompt.num_tokens})


async def stored_response(request: web.Request) -> web.Response:
    """Any method on /v1/responses/{id} and what is below it."""
    raise HttpError(404, ErrorCode.NOT_FOUND, _STORED_RESPONSE)


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    return web.json_response({"object": "list", "data": [_card(request.app[ENGINE])]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}"""
    check_model(request.app[ENGINE], request.match_info["model"].rstrip("/"))
    return web.json_response(_card(request.app[ENGINE]))


async def version(request: web.Request) -> web.Response:
    """GET /version"""
    return web.json_response({"version": kvshare.__version__})


async def _chat(request: web.Request) -> Answer:
    body = await read_body(request, ChatBody)
    return ChatAnswer(await chat_request(request, body), body, model=_model(request))


async def _completion(request: web.Request) -> Answer:
    engine, body = request.app[ENGINE], await read_body(request, CompletionBody)
    grammar = grammar_of(Chat((), answer_schema=body.answer_schema), engine.tool_format)
    encoding = (
        engine.encode_text(entry) if isinstance(entry, str) else engine.encode_tokens(entry)
        for entry in body.prompt
    )
    sampling = replace(body.sampling, grammar=grammar)
    requests = await engine_requests(request, encoding, sampling, body.kvshare)
    echoed = [
        entry if isinstance(entry, str) else await engine.decode_tokens(entry)
        for entry in (body.prompt if body.echo else ())
    ]
    return CompletionAnswer(requests, body, model=_model(request), echoed=echoed)


async def _response(request: web.Request) -> Answer:
    body = await read_body(request, ResponsesBody)
    return ResponseAnswer(await chat_request(request, body), body, model=_model(request))


async def _message(request: web.Request) -> Answer:
    body = await read_body(request, MessagesBody)
    asked, request_id = await chat_request(request, body), request[RECORD].request_id
    return MessageAnswer(asked, body, model=_model(request), client_request_id=request_id)


# What generates, and how a request to it is read, tokenized, and going to be answered.
_READERS: Mapping[str, Callable[[web.Request], Awaitable[Answer]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/messages": _message,
}
_PROMPT_AT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


def _model(request: web.Request) -> str:
    return request.app[ENGINE].card.model_id


def _too_long(exc: ContextLengthError) -> str:
    """In Anthropic's words, by which coding agents decide what to make shorter."""
    num_prompt, limit = exc.num_prompt_tokens, exc.max_model_len
    if num_prompt >= limit:
        return f"prompt is too long: {num_prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {exc.max_tokens} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )


def _card(engine: GeneratingEngine) -> dict[str, object]:
    card = engine.card
    return {
        "id": card.model_id,
        "object": "model",
        "created": card.created,
        "owned_by": "kvshare",
        "max_model_len": card.max_model_len,
    }
