"""
The /v1 routes in front of vLLM: two of them are planned, everything else is passed through as it is.

1. read      the body, as bytes with its members marked
2. tokenize  with vLLM's own tokenizer
3. forward   plan, choose the replica, send the client's bytes with salt and ticket, pass on the answer's

What cannot be planned, or fails to be, is forwarded without a plan.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from aiohttp import web

from delta_tree import DeltaTreeError, token_ids
from kvshare.errors import NoReplicaError, RequestError, UpstreamError
from kvshare.fleet.dispatch import Order
from kvshare.fleet.engine import VllmEngine
from kvshare.requests import Prompt, SharingMode
from proxy.auth import Role
from proxy.context import SERVER, accepting_server
from proxy.errors import wrong_content_type
from proxy.relay.forward import Outgoing, forward
from proxy.relay.json_members import JsonMembers, read_members
from proxy.relay.sanitize import check_form, check_path, client_salt
from proxy.relay.tokenize_body import TokenizeBody, Unplannable, for_chat, for_completion
from proxy.request_body import check_is_json, read_raw
from proxy.request_log import RECORD, class_and_place
from proxy.request_options import parse_kvshare, request_options

log = logging.getLogger(__name__)

ENGINE: web.AppKey[VllmEngine] = web.AppKey("vllm_engine", VllmEngine)
ToBody = Callable[[Mapping[str, Any], Collection[str]], TokenizeBody | Unplannable]

_OPERATORS_ONLY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # they read files on the server
_LONG_PROMPT = 20_000  # token ids; longer lists are converted off the event loop


def add_routes(
    app: web.Application, engine: VllmEngine, *, serves_clients: bool, serves_admins: bool
) -> None:
    """All of /v1 for clients, `/admin/explain` for admins, and for both the list of models."""
    app[ENGINE] = engine
    if serves_clients:
        app.router.add_post("/v1/chat/completions", chat_completions)
        app.router.add_post("/v1/completions", completions)
        app.router.add_route("*", "/v1/{path:.*}", pass_through)
    else:
        app.router.add_get("/v1/models", pass_through)
    if serves_admins:
        app.router.add_post("/admin/explain", explain)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    return await _generate(request, for_chat)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    return await _generate(request, for_completion)


async def pass_through(request: web.Request) -> web.StreamResponse:
    """Any other route under /v1, of vLLM's choice."""
    accepting_server(request)
    path = request.rel_url.raw_path_qs
    check_path(path)
    if request.path.rstrip("/") in _OPERATORS_ONLY:
        request.app[SERVER].keyring.require(request, Role.ADMIN)
    engine, owner = request.app[ENGINE], request[RECORD].caller.owner
    if request.content_type == "application/json" and request.can_read_body:
        members = await _read_json(request)
        order = Order(owner, client_salt=client_salt(members))
        return await forward(request, engine, Outgoing(path, order, members))
    form = await read_raw(request)
    if form and request.content_type != "multipart/form-data":
        raise wrong_content_type()
    check_form(form)
    return await forward(request, engine, Outgoing(path, Order(owner), form=form))


async def explain(request: web.Request) -> web.Response:
    """POST /admin/explain: the plan that this chat completion would get in the caller's own namespace."""
    accepting_server(request)
    engine = request.app[ENGINE]
    members = await _read_json(request)
    wanted = for_chat(members.document, _model_names(engine))
    if isinstance(wanted, Unplannable):
        raise RequestError(f"This request would not be planned: {wanted.reason}.")
    prompt = await _tokenize(engine, wanted)
    order = replace(_unplanned_order(request, members), prompt=prompt)
    return web.json_response(await engine.explain(order))


async def _generate(request: web.Request, to_body: ToBody) -> web.StreamResponse:
    accepting_server(request)
    members = await _read_json(request)
    order = await _order(request, members, to_body)
    request[RECORD].mode = order.mode
    outgoing = Outgoing(request.rel_url.raw_path_qs, order, members, ends_with_done=True)
    return await forward(request, request.app[ENGINE], outgoing)


async def _order(request: web.Request, members: JsonMembers, to_body: ToBody) -> Order:
    """The request as it is to be planned. A failure here costs the plan, not the request."""
    engine, order = request.app[ENGINE], _unplanned_order(request, members)
    if order.mode is SharingMode.OFF:
        return order
    wanted = to_body(members.document, _model_names(engine))
    if isinstance(wanted, Unplannable):
        engine.note_unshared(wanted.reason)
        return order
    began = time.perf_counter()
    try:
        prompt = await _tokenize(engine, wanted)
    except (UpstreamError, NoReplicaError, DeltaTreeError, OverflowError) as exc:
        log.debug("request %s is not planned: %s", request[RECORD].request_id, class_and_place(exc))
        engine.note_unshared("not_tokenized")
        return order
    request[RECORD].tokenize_s = time.perf_counter() - began
    return replace(order, prompt=prompt)


def _unplanned_order(request: web.Request, members: JsonMembers) -> Order:
    """What a request says of itself, before it is tokenized. Raises RequestError."""
    options = request_options(request, parse_kvshare(members.document))
    return Order(
        owner=request[RECORD].caller.owner,
        mode=options.mode,
        keep=options.store,
        client_salt=client_salt(members),
    )


async def _tokenize(engine: VllmEngine, wanted: TokenizeBody) -> Prompt:
    """Raises NoReplicaError, UpstreamError; DeltaTreeError, OverflowError for what are no tokens."""
    ids = wanted.token_ids
    numbers = await engine.tokenize(wanted.body) if ids is None else list(ids)
    if len(numbers) < _LONG_PROMPT:
        return Prompt(token_ids(np.asarray(numbers, dtype=np.int32)), wanted.text)
    array = await asyncio.to_thread(np.asarray, numbers, dtype=np.int32)
    return Prompt(token_ids(array), wanted.text)


def _model_names(engine: VllmEngine) -> Collection[str]:
    models = engine.fleet.models
    return models.names if models is not None else ()


async def _read_json(request: web.Request) -> JsonMembers:
    """Raises HttpError for another content type, RequestError for what is not JSON."""
    check_is_json(request)
    return read_members(await read_raw(request))
