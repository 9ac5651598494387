"""The OpenAI routes: a body becomes engine requests and the shape of its answer, for `run`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from aiohttp import web

from kvshare.engines.base import GenerationRequest, Prompt, SamplingParams
from kvshare.errors import ContextLengthError, ModelNotFoundError
from proxy.context import GENERATING, SERVER, ServerContext
from proxy.errors import not_found
from proxy.openai.bodies import ChatBody, CompletionBody, GenerationBody, parse_chat, parse_completion
from proxy.openai.responses import ChatResponse, CompletionResponse, Response
from proxy.openai.run import Job, answer
from proxy.request_body import read_object
from proxy.request_log import RECORD
from proxy.request_options import request_options


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    server = _accepting_server(request)
    body, chat = await read_chat(request)
    return await answer(
        request, Job((chat,), _response(ChatResponse, "chatcmpl", server, body, (chat,)), body)
    )


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    server = _accepting_server(request)
    body = parse_completion(await read_object(request))
    _check_model(server, body.model)
    prompts = await _encode_prompts(request, body)
    requests = [_engine_request(request, body, prompt, body.sampling) for prompt in prompts]
    job = Job(requests, _response(CompletionResponse, "cmpl", server, body, requests), body)
    try:
        return await answer(request, job)
    except ContextLengthError as exc:
        exc.param = "prompt"  # the class speaks of messages
        raise


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    server = _accepting_server(request)
    return web.json_response({"object": "list", "data": [_card(server)]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}"""
    server = _accepting_server(request)
    _check_model(server, request.match_info["model"])
    return web.json_response(_card(server))


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: refused with the way out, as newer clients call it by default."""
    raise not_found(
        "This server has no Responses API; use /v1/chat/completions "
        "(with the openai client: client.chat.completions.create)."
    )


async def explain(request: web.Request) -> web.Response:
    """POST /admin/explain: the plan that this chat completion would get for the caller's own namespace."""
    request.app[SERVER].lifecycle.check_accepting()
    _, chat = await read_chat(request)
    return web.json_response(await request.app[GENERATING].explain(chat))


async def read_chat(request: web.Request) -> tuple[ChatBody, GenerationRequest]:
    """A chat body and the engine's view of it."""
    server, record = request.app[SERVER], request[RECORD]
    body = parse_chat(await read_object(request))
    _check_model(server, body.model)
    started = time.perf_counter()
    prompt = await request.app[GENERATING].encode_chat([message.for_template() for message in body.messages])
    record.tokenize_s = time.perf_counter() - started
    return body, _engine_request(request, body, prompt, body.sampling)


async def _encode_prompts(request: web.Request, body: CompletionBody) -> list[Prompt]:
    engine, record = request.app[GENERATING], request[RECORD]
    started = time.perf_counter()
    prompts = [
        await (engine.encode_text(entry) if isinstance(entry, str) else engine.encode_tokens(entry))
        for entry in body.prompt
    ]
    record.tokenize_s = time.perf_counter() - started
    return prompts


def _engine_request(
    request: web.Request, body: GenerationBody, prompt: Prompt, sampling: SamplingParams
) -> GenerationRequest:
    options = request_options(request, body.kvshare)
    owner = request[RECORD].caller.owner
    return GenerationRequest(
        request_id=uuid.uuid4().hex,  # not the client's, which may come twice
        namespace=request.app[GENERATING].namespace(tenant=owner.tenant, scope=owner.scope),
        prompt=prompt,
        sampling=sampling,
        mode=options.mode,
        store=options.store,
    )


def _accepting_server(request: web.Request) -> ServerContext:
    server = request.app[SERVER]
    server.lifecycle.check_accepting()
    return server


def _check_model(server: ServerContext, name: str) -> None:
    if name != server.engine.card.model_id:
        raise ModelNotFoundError(name)


def _card(server: ServerContext) -> dict[str, object]:
    card = server.engine.card
    return {
        "id": card.model_id,
        "object": "model",
        "created": card.created,
        "owned_by": "kvshare",
        "max_model_len": card.max_model_len,
    }


def _response(
    shape: type[ChatResponse] | type[CompletionResponse],
    prefix: str,
    server: ServerContext,
    body: GenerationBody,
    requests: Sequence[GenerationRequest],
) -> Response:
    return shape(
        answer_id=f"{prefix}-{requests[0].request_id}",
        created=int(time.time()),
        model=server.engine.card.model_id,
        num_choices=len(requests) * body.num_choices,
        logprobs=requests[0].sampling.logprobs is not None,
        include_usage=body.include_usage,
    )
