"""The OpenAI routes: a body becomes engine requests and the shape of its answer, for `answering` to run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from aiohttp import web

from kvshare.engines.base import GenerationRequest, Prompt, SamplingParams, SharingMode
from kvshare.errors import ContextLengthError, ModelNotFoundError
from proxy.answering import Job, answer
from proxy.body import read_object
from proxy.errors import not_found
from proxy.front import FRONT, Front
from proxy.lifecycle import Phase
from proxy.record import RECORD
from proxy.schemas import ChatBody, CompletionBody, GenerationBody, parse_chat, parse_completion
from proxy.shapes import ChatShape, CompletionShape, Shape


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    front = _accepting_front(request)
    body, chat = await read_chat(request)
    return await answer(request, Job((chat,), _shape(ChatShape, "chatcmpl", front, body, (chat,)), body))


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    front = _accepting_front(request)
    body = parse_completion(await read_object(request))
    _check_model(front, body.model)
    prompts = await _encode_prompts(request, body)
    requests = [_engine_request(request, body, prompt, body.sampling) for prompt in prompts]
    job = Job(requests, _shape(CompletionShape, "cmpl", front, body, requests), body)
    try:
        return await answer(request, job)
    except ContextLengthError as exc:
        exc.param = "prompt"  # the class speaks of messages
        raise


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    front = _accepting_front(request)
    return web.json_response({"object": "list", "data": [_card(front)]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}"""
    front = _accepting_front(request)
    _check_model(front, request.match_info["model"])
    return web.json_response(_card(front))


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: refused with the way out, as newer clients call it by default."""
    raise not_found(
        "This server has no Responses API; use /v1/chat/completions "
        "(with the openai client: client.chat.completions.create)."
    )


async def health(request: web.Request) -> web.Response:
    """GET /health: the process answers."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 when requests are taken; loading, draining and a dead engine are 503."""
    front = request.app[FRONT]
    phase = front.lifecycle.phase
    if phase is not Phase.READY:
        return web.json_response({"status": phase, "detail": ""}, status=503)
    status = front.engine.status()
    document = {"status": "ready" if status.ready else "failed", "detail": status.detail}
    return web.json_response(document, status=200 if status.ready else 503)


async def read_chat(request: web.Request) -> tuple[ChatBody, GenerationRequest]:
    """A chat body and the engine's view of it. Also what `/admin/explain` explains."""
    front, record = request.app[FRONT], request[RECORD]
    body = parse_chat(await read_object(request))
    _check_model(front, body.model)
    started = time.perf_counter()
    prompt = await front.engine.encode_chat([message.for_template() for message in body.messages])
    record.tokenize_s = time.perf_counter() - started
    return body, _engine_request(request, body, prompt, body.sampling)


async def _encode_prompts(request: web.Request, body: CompletionBody) -> list[Prompt]:
    engine, record = request.app[FRONT].engine, request[RECORD]
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
    front = request.app[FRONT]
    directives = _cache_directives(request)
    mode = body.mode or SharingMode(front.settings.sharing.mode)
    return GenerationRequest(
        request_id=uuid.uuid4().hex,  # not the client's, which may come twice
        namespace=request[RECORD].caller.namespace(front.engine),
        prompt=prompt,
        sampling=sampling,
        mode=SharingMode.OFF if "no-cache" in directives else mode,
        store=body.may_store and "no-store" not in directives,
    )


def _cache_directives(request: web.Request) -> set[str]:
    headers = request.headers.getall("Cache-Control", [])
    return {directive.strip().lower() for header in headers for directive in header.split(",")}


def _accepting_front(request: web.Request) -> Front:
    front = request.app[FRONT]
    front.lifecycle.check_accepting()
    return front


def _check_model(front: Front, name: str) -> None:
    if name != front.engine.card.model_id:
        raise ModelNotFoundError(name)


def _card(front: Front) -> dict[str, object]:
    card = front.engine.card
    return {
        "id": card.model_id,
        "object": "model",
        "created": card.created,
        "owned_by": "kvshare",
        "max_model_len": card.max_model_len,
    }


def _shape(
    shape: type[ChatShape] | type[CompletionShape],
    prefix: str,
    front: Front,
    body: GenerationBody,
    requests: Sequence[GenerationRequest],
) -> Shape:
    return shape(
        answer_id=f"{prefix}-{requests[0].request_id}",
        created=int(time.time()),
        model=front.engine.card.model_id,
        num_choices=len(requests) * body.num_choices,
        logprobs=requests[0].sampling.logprobs is not None,
        include_usage=body.include_usage,
    )
