"""
The /v1 routes of an engine that generates here, and their handlers.

1. read      the body, checked                                         `bodies`
2. tokenize  by the engine: a prompt becomes a `GenerationRequest`
3. run       in the engine; the answer is written as it comes          `run`
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Iterable

from aiohttp import web

from kvshare.conversation.chat import Chat
from kvshare.engines.base import GeneratingEngine, GenerationRequest
from kvshare.errors import ContextLengthError, ModelNotFoundError
from kvshare.requests import Prompt
from proxy.errors import HttpError
from proxy.generate.chat.answers import ChatAnswer, CompletionAnswer
from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.run import answer
from proxy.request_body import read_object, validated
from proxy.request_log import RECORD
from proxy.request_options import request_options

ENGINE: web.AppKey[GeneratingEngine] = web.AppKey("generating_engine", GeneratingEngine)


def add_routes(
    app: web.Application, engine: GeneratingEngine, *, serves_clients: bool, serves_admins: bool
) -> None:
    """All of /v1 for clients, `/admin/explain` for admins, and for both the list of models."""
    app[ENGINE] = engine
    app.router.add_get("/v1/models", models)
    if serves_clients:
        app.router.add_get("/v1/models/{model:.+}", model)
        app.router.add_post("/v1/chat/completions", chat_completions)
        app.router.add_post("/v1/completions", completions)
        app.router.add_post("/v1/responses", responses)
    if serves_admins:
        app.router.add_post("/admin/explain", explain)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    return await answer(request, request.app[ENGINE], await _read_chat(request))


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    engine = request.app[ENGINE]
    body = validated(CompletionBody, await read_object(request))
    _check_model(engine, body.model)
    encoding = (
        engine.encode_text(entry) if isinstance(entry, str) else engine.encode_tokens(entry)
        for entry in body.prompt
    )
    requests = await _engine_requests(request, body, encoding)
    try:
        return await answer(request, engine, CompletionAnswer(requests, body, model=engine.card.model_id))
    except ContextLengthError as exc:
        exc.param = "prompt"  # the class speaks of messages
        raise


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    return web.json_response({"object": "list", "data": [_card(request.app[ENGINE])]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}"""
    _check_model(request.app[ENGINE], request.match_info["model"])
    return web.json_response(_card(request.app[ENGINE]))


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: refused with the way out, as newer clients call it by default."""
    message = (
        "This server has no Responses API; use /v1/chat/completions "
        "(with the openai client: client.chat.completions.create)."
    )
    raise HttpError(404, "not_found", message)


async def explain(request: web.Request) -> web.Response:
    """POST /admin/explain: the plan that this chat completion would get for the caller's own namespace."""
    (chat,) = (await _read_chat(request)).requests
    document = await request.app[ENGINE].explain(chat)
    return web.json_response({**document, "rules": request[RECORD].rules})


async def _read_chat(request: web.Request) -> ChatAnswer:
    """A chat body and the engine's view of it, as the answer that is to be written."""
    engine = request.app[ENGINE]
    body = validated(ChatBody, await read_object(request))
    _check_model(engine, body.model)
    encoding = [engine.encode_chat(Chat(tuple(message.for_template() for message in body.messages)))]
    requests = await _engine_requests(request, body, encoding)
    return ChatAnswer(requests, body, model=engine.card.model_id)


async def _engine_requests(
    request: web.Request, body: ChatBody | CompletionBody, encoding: Iterable[Awaitable[Prompt]]
) -> list[GenerationRequest]:
    """One for each prompt of a body, which is being tokenized."""
    record, started = request[RECORD], time.perf_counter()
    prompts = [await prompt for prompt in encoding]
    record.tokenize_s = time.perf_counter() - started
    options, owner = request_options(request, body.kvshare), record.caller.owner
    namespace = request.app[ENGINE].namespace(tenant=owner.tenant, scope=owner.scope)
    return [
        GenerationRequest(
            request_id=uuid.uuid4().hex if number else record.unique_id,
            namespace=namespace,
            prompt=prompt,
            sampling=body.sampling,
            mode=options.mode,
            store=options.store,
        )
        for number, prompt in enumerate(prompts)
    ]


def _check_model(engine: GeneratingEngine, name: str) -> None:
    if name != engine.card.model_id:
        raise ModelNotFoundError(name, served=engine.card.model_id)


def _card(engine: GeneratingEngine) -> dict[str, object]:
    card = engine.card
    return {
        "id": card.model_id,
        "object": "model",
        "created": card.created,
        "owned_by": "kvshare",
        "max_model_len": card.max_model_len,
    }
