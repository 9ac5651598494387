"""
The /v1 routes in front of vLLM: two of them are planned, everything else is passed through as it is.

1. read      the body, as bytes with its members marked
2. plan      tokenize with vLLM's own tokenizer, find donors, choose the replica        `VllmEngine.dispatch`
3. relay     the client's bytes, with salt and ticket; the answer's bytes back          `RelayedRequest`

What cannot be planned, or fails to be, is relayed without a plan.
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
from kvshare.engines.base import Engine, Prompt, SharingMode
from kvshare.engines.vllm.dispatch import Order
from kvshare.engines.vllm.engine import VllmEngine
from kvshare.errors import NoReplicaError, RequestError, UpstreamError
from kvshare.settings import ReplicaSettings, Settings
from proxy.api import Api
from proxy.auth import Role
from proxy.context import SERVER
from proxy.errors import wrong_content_type
from proxy.relay.forward import Outgoing, RelayedRequest
from proxy.relay.json_members import JsonMembers, read_members
from proxy.relay.sanitize import check_form, check_path, client_salt
from proxy.relay.tokenize_body import TokenizeBody, Unplannable, for_chat, for_completion
from proxy.relay.upstream import HttpUpstream
from proxy.request_body import read_raw
from proxy.request_log import RECORD
from proxy.request_options import parse_kvshare, request_options

log = logging.getLogger(__name__)

ToBody = Callable[[Mapping[str, Any], Collection[str]], TokenizeBody | Unplannable]

_OPERATORS_ONLY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # they read files on the server
_LONG_PROMPT = 20_000  # token ids; longer lists are converted off the event loop


class RelayApi(Api):
    """In front of the replicas of the settings."""

    def __init__(self, settings: Settings, upstreams: Mapping[str, HttpUpstream], engine: VllmEngine) -> None:
        self._settings = settings
        self._upstreams = upstreams
        self._engine = engine

    @classmethod
    def from_settings(cls, settings: Settings) -> RelayApi:
        """Raises ConfigError if there are no replicas, or two of one name."""
        upstreams: dict[str, HttpUpstream] = {}

        def connect(replica: ReplicaSettings) -> HttpUpstream:
            upstreams[replica.label] = HttpUpstream(replica, settings.vllm)
            return upstreams[replica.label]

        return cls(settings, upstreams, VllmEngine(settings, connect))

    @property
    def engine(self) -> Engine:
        return self._engine

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_route("*", "/v1/{path:.*}", self._pass_through)

    def add_operator_routes(self, app: web.Application) -> None:
        app.router.add_post("/admin/explain", self._explain)

    def add_model_list(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._pass_through)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._generate(request, for_chat)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._generate(request, for_completion)

    async def _generate(self, request: web.Request, to_body: ToBody) -> web.StreamResponse:
        self._check_accepting(request)
        members = await _read_json(request)
        order = await self._order(request, members, to_body)
        request[RECORD].mode = order.mode
        return await self._relay(
            request, Outgoing(request.rel_url.raw_path_qs, order, members, ends_with_done=True)
        )

    async def _pass_through(self, request: web.Request) -> web.StreamResponse:
        """Anything else under /v1, whatever it is."""
        self._check_accepting(request)
        path = request.rel_url.raw_path_qs
        check_path(path)
        if request.path.rstrip("/") in _OPERATORS_ONLY:
            request.app[SERVER].keyring.require(request, Role.ADMIN)
        owner = request[RECORD].caller.owner
        if request.content_type == "application/json" and request.can_read_body:
            members = await _read_json(request)
            order = Order(owner, client_salt=client_salt(members))
            return await self._relay(request, Outgoing(path, order, members))
        form = await read_raw(request)
        if form and request.content_type != "multipart/form-data":
            raise wrong_content_type()
        check_form(form)
        return await self._relay(request, Outgoing(path, Order(owner), form=form))

    async def _explain(self, request: web.Request) -> web.Response:
        """POST /admin/explain: the plan that this chat completion would get in the caller's own namespace."""
        self._check_accepting(request)
        members = await _read_json(request)
        wanted = for_chat(members.document, self._model_names)
        if isinstance(wanted, Unplannable):
            raise RequestError(f"This request would not be planned: {wanted.reason}.")
        prompt = await self._tokenize(wanted)
        order = replace(self._new_order(request, members), prompt=prompt)
        return web.json_response(await self._engine.explain(order))

    async def _order(self, request: web.Request, members: JsonMembers, to_body: ToBody) -> Order:
        """What can be planned of a request. Whatever goes wrong here costs the plan, not the request."""
        order = self._new_order(request, members)
        if order.mode is SharingMode.OFF:
            return order
        wanted = to_body(members.document, self._model_names)
        if isinstance(wanted, Unplannable):
            self._engine.note_unshared(wanted.reason)
            return order
        began = time.perf_counter()
        try:
            prompt = await self._tokenize(wanted)
        except (UpstreamError, NoReplicaError, DeltaTreeError, OverflowError) as exc:
            log.debug("request %s is not planned: %s", request[RECORD].request_id, exc)
            self._engine.note_unshared("not_tokenized")
            return order
        request[RECORD].tokenize_s = time.perf_counter() - began
        return replace(order, prompt=prompt)

    def _new_order(self, request: web.Request, members: JsonMembers) -> Order:
        options = request_options(request, parse_kvshare(members.document))
        return Order(
            owner=request[RECORD].caller.owner,
            mode=options.mode,
            keep=options.store,
            client_salt=client_salt(members),
        )

    async def _tokenize(self, wanted: TokenizeBody) -> Prompt:
        """Raises NoReplicaError, UpstreamError; DeltaTreeError, OverflowError for what are no tokens."""
        ids = wanted.token_ids
        numbers = await self._engine.tokenize(wanted.body) if ids is None else list(ids)
        if len(numbers) < _LONG_PROMPT:
            return Prompt(token_ids(np.asarray(numbers, dtype=np.int32)), wanted.text)
        array = await asyncio.to_thread(np.asarray, numbers, dtype=np.int32)
        return Prompt(token_ids(array), wanted.text)

    async def _relay(self, request: web.Request, outgoing: Outgoing) -> web.StreamResponse:
        relayed = RelayedRequest(
            request,
            outgoing,
            self._engine,
            self._upstreams,
            read_timeout_s=self._settings.vllm.read_timeout_s,
        )
        with request.app[SERVER].lifecycle.running(relayed):
            return await relayed.run()

    @property
    def _model_names(self) -> Collection[str]:
        models = self._engine.fleet.models
        return models.names if models is not None else ()

    @staticmethod
    def _check_accepting(request: web.Request) -> None:
        request.app[SERVER].lifecycle.check_accepting()


async def _read_json(request: web.Request) -> JsonMembers:
    """Raises HttpError for another content type, RequestError for what is not JSON."""
    if request.content_type != "application/json":
        raise wrong_content_type()
    return read_members(await read_raw(request))
