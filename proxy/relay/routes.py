"""
The /v1 routes in front of vLLM: requests that generate are planned, all others are relayed unchanged.

1. read      the body, as bytes and parsed
2. render    its prompt into tokens, by vLLM itself: `dialects.py`, which handles the differences of routes
3. forward   plan, choose the replica, send the body with salt and ticket, relay the answer: `forward.py`

A request that cannot be planned, or whose planning fails, is forwarded without a plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from kvshare.errors import ModelNotFoundError, NoReplicaError, RequestError, UpstreamError
from kvshare.fleet.engine import VllmEngine
from kvshare.fleet.routed_request import Execution, Incoming, RoutedRequest
from kvshare.reasons import Reason, cache_miss_reason
from kvshare.requests import SharingMode
from kvshare.safe_logging import class_and_place
from proxy.anthropic_models import model_of, page_of
from proxy.azure import add_routes as add_azure_routes
from proxy.azure import is_of_deployment, openai_url
from proxy.context import SERVER
from proxy.errors import speaks_anthropic
from proxy.relay.dialects import DIALECTS, Dialect, ReadPrompt, Unplannable, prompt_of
from proxy.relay.formats import formats_of
from proxy.relay.forward import RelayedRequest
from proxy.relay.sanitize import check_form, check_path, is_for_operators, sanitized
from proxy.request_body import (
    api_of,
    check_is_json,
    explained,
    is_controlled,
    parse_kvshare,
    read_object,
    read_raw,
    request_options,
)
from proxy.request_history import stored_documents
from proxy.request_record import RECORD, client_of

log = logging.getLogger(__name__)

ENGINE: web.AppKey[VllmEngine] = web.AppKey("vllm_engine", VllmEngine)


def add_routes(
    app: web.Application, engine: VllmEngine, *, serves_clients: bool, serves_admins: bool
) -> None:
    """Add /v1 and Azure's paths for clients, `/admin/explain` for admins, and the list of models for both."""
    app[ENGINE] = engine
    app.router.add_get("/v1/models", models)
    if serves_clients:
        app.router.add_get("/v1/models/{model:.+}", model)
        for path in DIALECTS:
            app.router.add_post(path, generate)
            app.router.add_post(f"{path}/", generate)
        app.router.add_route("*", "/v1/{path:.*}", pass_through)
        add_azure_routes(app, generate=generate, embeddings=pass_through, models=models, model=model)
    if serves_admins:
        app.router.add_post("/admin/explain", explain)


async def models(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/models with vLLM's list; for Anthropic's clients in Anthropic's form."""
    if not speaks_anthropic(request):
        return await pass_through(request)
    return web.json_response(page_of(await _listed(request), request.query))


async def model(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/models/{model} as vLLM does; for Anthropic's clients from vLLM's list."""
    if not speaks_anthropic(request):
        return await pass_through(request)
    name, cards = request.match_info["model"].rstrip("/"), await _listed(request)
    if (card := next((card for card in cards if card["id"] == name), None)) is None:
        raise ModelNotFoundError(name, served=", ".join(str(card["id"]) for card in cards))
    return web.json_response(model_of(card))


async def _listed(request: web.Request) -> list[Mapping[str, Any]]:
    """List the models of one replica; all replicas serve the same. Raises NoReplicaError, UpstreamError."""
    async with request.app[SERVER].lifecycle.running():
        cards = await request.app[ENGINE].fleet.idlest().vllm.list_models()
    return [card for card in cards if isinstance(card.get("id"), str)]


async def pass_through(request: web.Request) -> web.StreamResponse:
    """Relay any other route of vLLM under /v1."""
    path = openai_url(request).raw_path_qs
    check_path(path)
    if is_for_operators(path):
        request.app[SERVER].keyring.check_admin(request, request[RECORD].admission.caller)
    router = request.app[ENGINE].server.router
    is_json = request.content_type == "application/json" and request.can_read_body
    if is_json:
        body, document = await _read_json(request)
        await _check_formats(request, document)
    else:
        body = await read_raw(request)
        if body and request.content_type != "multipart/form-data":
            check_is_json(request)
        check_form(body)
    routed = RoutedRequest(Incoming(request[RECORD].owner))
    return await RelayedRequest(request, router, routed, body, is_json=is_json).forward()


async def explain(request: web.Request) -> web.Response:
    """Answer POST /admin/explain with the plan that this request would get in the caller's namespace."""
    engine, dialect = request.app[ENGINE], DIALECTS[api_of(request)]
    body, document = await _read_json(request)
    await _check_formats(request, document)
    try:
        read = await prompt_of(document, body, dialect=dialect, engine=engine)
    except Unplannable as exc:
        raise RequestError(f"This request would not be planned: {exc}.") from exc
    return explained(
        request, await engine.explain(replace(_untokenized(request, document), prompt=read.prompt))
    )


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer a POST to a route that generates. The request is planned if its prompt is known."""
    dialect = DIALECTS[api_of(request)]
    body, document = await _read_json(request)
    await _check_formats(request, document)  # before vLLM reads the whole body to render the prompt
    incoming, execution, prepared = _untokenized(request, document), Execution(), request[RECORD].preparation
    prepared.body_s = request[RECORD].duration_s
    prepared.mode, prepared.executed = incoming.mode, partial(_executed, execution)
    if incoming.mode is SharingMode.OFF:
        prepared.unplanned = Reason.OFF
    elif (read := await _rendered(request, document, body, dialect)) is not None:
        incoming = replace(incoming, prompt=read.prompt, rendered=read.rendered)
    routed = RoutedRequest(incoming, execution=execution)
    router = request.app[ENGINE].server.router
    return await RelayedRequest(request, router, routed, body, dialect=dialect).forward()


async def _check_formats(request: web.Request, document: Mapping[str, Any]) -> None:
    """Check a body's formats. Raises UnsupportedFormatError, OverloadedError, RequestError (too deep)."""
    try:
        formats = formats_of(document)
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.") from None
    if formats:
        await request.app[ENGINE].server.formats.check(formats, key=client_of(request))


def _executed(execution: Execution) -> dict[str, Any]:
    """Return the replica's report of a request, which may arrive after the end of the answer."""
    finished = execution.finished
    return {
        "replica": execution.replica,
        "executed": finished
        and {
            "decision": finished.decision,
            "reason": finished.reason,
            "cache_miss_reason": cache_miss_reason(finished.reason),
            "computed": finished.num_computed,
            "prefix_cache": finished.num_local,
            "seconds": dict(finished.stage_seconds),
        },
        **stored_documents([execution.stored]),
    }


def _untokenized(request: web.Request, document: Mapping[str, Any]) -> Incoming:
    """Return the request without its prompt. Raises RequestError."""
    asked = parse_kvshare(document)
    options, engine, owner = request_options(request, asked), request.app[ENGINE], request[RECORD].owner
    for namespace in engine.digests_of(owner):
        engine.tenants.note(namespace, owner)
    return Incoming(
        owner=owner,
        unique_id=request[RECORD].unique_id,
        mode=options.mode,
        max_deviation=options.max_deviation,
        may_store=options.may_store,
        is_controlled=is_controlled(asked),
    )


async def _rendered(
    request: web.Request, document: Mapping[str, Any], body: bytes, dialect: Dialect
) -> ReadPrompt | None:
    """Render the prompt; None if it cannot be planned. A failure costs the plan, not the request."""
    engine, record = request.app[ENGINE], request[RECORD]
    began = time.perf_counter()
    try:
        if not engine.fleet.sharing():  # nothing can be planned: rendering would only take time
            raise Unplannable(engine.fleet.why_none_shares)
        read = await prompt_of(document, body, dialect=dialect, engine=engine)
    except (
        *(Unplannable, UpstreamError, NoReplicaError),
        RecursionError,  # parts are nested too deeply
    ) as exc:
        log.debug("request %s is not planned: %s", record.request_id, class_and_place(exc))
        reason = exc.reason if isinstance(exc, Unplannable) else Reason.NOT_TOKENIZED
        record.preparation.unplanned = reason
        engine.sharing.telemetry.unshared(reason)
        return None
    record.preparation.tokenize_s = time.perf_counter() - began
    return read


async def _read_json(request: web.Request) -> tuple[bytes, dict[str, Any]]:
    """
    Return the sanitized body to send on, and the parsed body. The operator's rules are applied to both.

    Raises:  HttpError for another content type; RequestError for a body that is not a JSON object, because
             such a body could not be sanitized
    """
    document = await read_object(request)
    is_rewritten = bool(request[RECORD].body.rules) or is_of_deployment(request)
    raw = None if is_rewritten else await read_raw(request)
    return sanitized(raw, document, path=api_of(request)), document
