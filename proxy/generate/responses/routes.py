"""POST /v1/responses; what concerns stored responses is refused, as there are none."""

from __future__ import annotations

from aiohttp import web

from kvshare.errors import ContextLengthError, ErrorCode
from proxy.errors import HttpError
from proxy.generate.chat_requests import chat_request
from proxy.generate.engine_key import ENGINE
from proxy.generate.requests import check_model
from proxy.generate.responses.answers import ResponseAnswer
from proxy.generate.responses.bodies import ResponsesBody
from proxy.generate.run import answer
from proxy.request_body import read_object, validated


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses"""
    engine = request.app[ENGINE]
    body = validated(ResponsesBody, await read_object(request))
    check_model(engine, body.model)
    asked = await chat_request(request, engine, body.chat, body.sampling, body.kvshare)
    written = ResponseAnswer(
        asked.generation,
        asked.new_parser(),
        model=engine.card.model_id,
        is_stream=body.stream,
        echo=body.echo,
    )
    try:
        return await answer(request, engine, written)
    except ContextLengthError as exc:
        exc.param = "input"  # the class speaks of messages
        raise


async def stored_response(request: web.Request) -> web.Response:
    """Any method on /v1/responses/{id} and what is below it."""
    message = (
        "This server stores no responses, so that none can be read, deleted or continued: "
        "keep what you get, and send the whole conversation as 'input' of POST /v1/responses."
    )
    raise HttpError(404, ErrorCode.NOT_FOUND, message)
