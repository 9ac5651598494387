"""
OpenAI's API under Azure's paths, by which the class AzureOpenAI of the openai package asks:

    /openai/deployments/{deployment}/chat/completions    /v1/chat/completions of the model with this name
    /openai/models                                       /v1/models

The path's deployment is the model, whatever the body names, as with Azure. The query's `api-version`, which
numbers Azure's own API, is ignored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from yarl import URL

ROOT = "/openai"
_DEPLOYMENT = ROOT + "/deployments/{deployment:.+}"
_GENERATING = ("/chat/completions", "/completions")  # below a deployment; the first that matches counts
_EMBEDDINGS = "/embeddings"
_VERSION = "api-version"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_routes(
    app: web.Application, *, generate: _Handler, embeddings: _Handler, models: _Handler, model: _Handler
) -> None:
    """Azure's paths for the handlers of OpenAI's, which see the path by `openai_url`."""
    for end in ("", "/"):  # some clients join their URLs so
        for path in _GENERATING:
            app.router.add_post(f"{_DEPLOYMENT}{path}{end}", generate)
        app.router.add_post(f"{_DEPLOYMENT}{_EMBEDDINGS}{end}", embeddings)
        app.router.add_post(f"{ROOT}/responses{end}", generate)
        app.router.add_get(f"{ROOT}/models{end}", models)
    app.router.add_get(ROOT + "/models/{model:.+}", model)


def openai_url(request: web.Request) -> URL:
    """Path and query of a request in OpenAI's API: its own, but where it came by one of Azure's paths."""
    url = request.rel_url
    if not url.path.startswith(f"{ROOT}/"):
        return url
    path = url.path.removeprefix(ROOT).rstrip("/")  # decoded, as routes are matched
    if is_of_deployment(request):
        path = next(each for each in (*_GENERATING, _EMBEDDINGS) if path.endswith(each))
    return url.without_query_params(_VERSION).with_path(f"/v1{path}", keep_query=True)


def is_of_deployment(request: web.Request) -> bool:
    return "deployment" in request.match_info


def with_deployment(request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "model": request.match_info["deployment"]} if is_of_deployment(request) else body
