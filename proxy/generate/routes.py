"""The routes of an engine that generates here, by API; and which model it serves."""

from __future__ import annotations

from aiohttp import web

import kvshare
from kvshare.engines.base import GeneratingEngine
from proxy.generate.chat.routes import chat_completions, completions, explain
from proxy.generate.embeddings import embeddings
from proxy.generate.engine_key import ENGINE
from proxy.generate.messages.routes import count_tokens, messages
from proxy.generate.requests import check_model
from proxy.generate.responses.routes import responses, stored_response
from proxy.generate.tokenization import detokenize, tokenize


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
        app.router.add_route("*", "/v1/responses/{path:.+}", stored_response)
        app.router.add_post("/v1/messages", messages)
        app.router.add_post("/v1/messages/count_tokens", count_tokens)
        app.router.add_post("/v1/embeddings", embeddings)
        app.router.add_post("/tokenize", tokenize)
        app.router.add_post("/detokenize", detokenize)
        app.router.add_get("/version", version)
    if serves_admins:
        app.router.add_post("/admin/explain", explain)


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


def _card(engine: GeneratingEngine) -> dict[str, object]:
    card = engine.card
    return {
        "id": card.model_id,
        "object": "model",
        "created": card.created,
        "owned_by": "kvshare",
        "max_model_len": card.max_model_len,
    }
