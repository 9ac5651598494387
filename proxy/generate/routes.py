"""
The routes of an engine that generates here. What all four APIs do with a request that generates:

1. read      the body, checked: `bodies` of each API
2. tokenize  by the engine: a prompt becomes a `GenerationRequest`, see `requests.py`
3. run       in the engine; the answer is written as it comes, by an `AnswerWriter` of the API, see `run.py`

`/admin/explain` stops before the third.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from aiohttp import web

from kvshare.conversation.chat import Chat
from kvshare.conversation.grammar import grammar_of, may_have_grammar
from kvshare.engine import GeneratingEngine
from kvshare.errors import ContextLengthError, ErrorCode, RequestError
from proxy.azure import add_routes as add_azure_routes
from proxy.errors import HttpError, is_anthropic
from proxy.generate import models
from proxy.generate.answer_writer import AnswerWriter
from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.chat.chat_writer import ChatWriter
from proxy.generate.chat.completion_writer import CompletionWriter
from proxy.generate.messages.bodies import CountTokensBody, MessagesBody
from proxy.generate.messages.message_writer import MessageWriter
from proxy.generate.requests import ENGINE, ChatRequest, chat_request, engine_requests, read_body
from proxy.generate.responses.bodies import ResponsesBody
from proxy.generate.responses.response_writer import ResponseWriter
from proxy.generate.run import answer
from proxy.request_body import api_of, explained
from proxy.wrong_values import invalid

_ChatBody = TypeVar("_ChatBody", ChatBody, ResponsesBody, MessagesBody)

_STORED_RESPONSE = (
    "This server stores no responses, so that none can be read, deleted or continued: "
    "keep what you get, and send the whole conversation as 'input' of POST /v1/responses."
)


def add_routes(
    app: web.Application, engine: GeneratingEngine, *, serves_clients: bool, serves_admins: bool
) -> None:
    """All of /v1 and Azure's paths for clients, `/admin/explain` for admins, for both the list of models."""
    app[ENGINE] = engine
    app.router.add_get("/v1/models", models.served)
    if serves_clients:
        app.router.add_get("/v1/models/{model:.+}", models.served_by_name)
        for path in _READERS:
            app.router.add_post(path, generate)
        app.router.add_route("*", "/v1/responses/{path:.+}", stored_response)
        app.router.add_post("/v1/messages/count_tokens", count_tokens)
        app.router.add_post("/v1/embeddings", models.embeddings)
        app.router.add_post("/tokenize", models.tokenize)
        app.router.add_post("/detokenize", models.detokenize)
        app.router.add_get("/version", models.version)
        add_azure_routes(
            app,
            generate=generate,
            embeddings=models.embeddings,
            models=models.served,
            model=models.served_by_name,
        )
    if serves_admins:
        app.router.add_post("/admin/explain", explain)


async def generate(request: web.Request) -> web.StreamResponse:
    path = api_of(request)
    with _errors_as_in(path):
        return await answer(request, request.app[ENGINE], await _READERS[path](request))


async def explain(request: web.Request) -> web.Response:
    """POST /admin/explain: the plan that this request would get for the caller's own namespace."""
    path = api_of(request)
    with _errors_as_in(path):
        requests = (await _READERS[path](request)).requests
    if len(requests) != 1:
        raise invalid("prompt", f"expected one prompt, got {len(requests)}")
    engine = request.app[ENGINE]
    document = await engine.explain(requests[0])
    if request.query.get("texts") == "true":  # the client's own
        ids = requests[0].prompt.token_ids.tolist()
        for span in document["spans"]:
            span["text"] = await engine.decode_tokens(ids[span["start"] : span["end"]])
    return explained(request, document)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: of the prompt that this body becomes, its template included."""
    body = await read_body(request, CountTokensBody)
    with _errors_as_in(request.path):
        prompt = await request.app[ENGINE].encode_chat(body.chat)
    return web.json_response({"input_tokens": prompt.num_tokens})


async def stored_response(request: web.Request) -> web.Response:
    """Any method on /v1/responses/{id} and what is below it."""
    raise HttpError(404, ErrorCode.NOT_FOUND, _STORED_RESPONSE)


def _chat_reader(
    body_type: type[_ChatBody], writer_type: Callable[[ChatRequest, _ChatBody], AnswerWriter]
) -> Callable[[web.Request], Awaitable[AnswerWriter]]:
    """Make the reader of an API for chats."""

    async def read(request: web.Request) -> AnswerWriter:
        body = await read_body(request, body_type)
        return writer_type(await chat_request(request, body.chat, body.sampling, body.kvshare), body)

    return read


async def _completion(request: web.Request) -> AnswerWriter:
    engine, body = request.app[ENGINE], await read_body(request, CompletionBody)
    chat = Chat((), answer_schema=body.answer_schema, answer_param=body.answer_param)
    grammar = None
    if may_have_grammar(chat):
        grammar = await asyncio.to_thread(grammar_of, chat, engine.tool_format)
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
    return CompletionWriter(requests, body, engine.card.model_id, echoed)


# The generating routes, each with its reader, which makes the writer of the answer.
_READERS: Mapping[str, Callable[[web.Request], Awaitable[AnswerWriter]]] = {
    "/v1/chat/completions": _chat_reader(ChatBody, ChatWriter),
    "/v1/completions": _completion,
    "/v1/responses": _chat_reader(ResponsesBody, ResponseWriter),
    "/v1/messages": _chat_reader(MessagesBody, MessageWriter),
}
_PROMPT_AT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


@contextmanager
def _errors_as_in(path: str) -> Iterator[None]:
    """The engine, which knows no API, calls every prompt 'messages': the error names the API's own field."""
    try:
        yield
    except ContextLengthError as exc:
        if is_anthropic(path):
            raise RequestError(_too_long(exc)) from exc
        exc.param = _PROMPT_AT[path]
        raise
    except RequestError as exc:
        if exc.param == "messages":
            exc.param = _PROMPT_AT.get(path, exc.param)
        raise


def _too_long(exc: ContextLengthError) -> str:
    """Return Anthropic's words, by which coding agents decide what to shorten."""
    num_prompt, limit = exc.num_prompt_tokens, exc.max_model_len
    if exc.is_bound:
        return f"prompt is too long: at least {num_prompt} tokens > {limit} maximum"
    if num_prompt >= limit:
        return f"prompt is too long: {num_prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {exc.max_tokens} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )
