"""The routes in front of vLLM, which answers them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from proxy.openapi.answers import RelayedBody
from proxy.openapi.generated_routes import (
    AZURE,
    AZURE_CHAT,
    CHAT,
    COMPLETIONS,
    EXPLAIN,
    ONE_MODEL,
    PAGE,
    TWO_FORMS,
)
from proxy.openapi.operation import ANY, MODEL, Operation, RouteAnswer, RouteGroup, text

_PLANNED = (
    "Planned here, answered by vLLM: it takes vLLM's parameters, besides `kvshare`. What vLLM answers is "
    "passed on, its refusals too."
)
_RELAYED = partial(
    Operation,
    answers={
        200: RouteAnswer("vLLM's answer.", {ANY: None}),
        "default": RouteAnswer("vLLM's refusal, in its own shape.", {ANY: None}),
    },
    errors=(400, 502, 504),
    error=None,
)
_PLANNED_POST = partial(_RELAYED, "POST", group=RouteGroup.GENERATE, description=_PLANNED, body=RelayedBody)

_RESPONSES = _PLANNED_POST("/v1/responses", "Answer by OpenAI's Responses API")
_LIST = _RELAYED(
    "GET",
    "/v1/models",
    "The models that vLLM serves",
    group=RouteGroup.MODELS,
    description=TWO_FORMS,
    query=PAGE,
)
_MODEL = _RELAYED(
    "GET",
    "/v1/models/{model}",
    "One of them by its name",
    group=RouteGroup.MODELS,
    description="As vLLM answers it, if it does; with the header `anthropic-version` in Anthropic's form.",
    path=ONE_MODEL,
)
_AZURE_CHAT = _RELAYED(
    "POST",
    AZURE_CHAT.route,
    AZURE_CHAT.summary,
    group=AZURE_CHAT.group,
    description=AZURE,
    path=AZURE_CHAT.path,
    body=RelayedBody,
    example=AZURE_CHAT.example,
)
_OTHER = _RELAYED(
    "GET",
    "/v1/{path}",
    "Any other route of vLLM under /v1",
    group=RouteGroup.GENERATE,
    description="Passed on as it is, whatever the method. A multipart form is taken as well as JSON.",
    path={"path": text("The rest of the route, slashes included.", example="models")},
)

RELAYED_ROUTES = (
    _PLANNED_POST(CHAT.route, CHAT.summary, example=CHAT.example),
    _PLANNED_POST(COMPLETIONS.route, COMPLETIONS.summary, example=COMPLETIONS.example),
    _RESPONSES,
    _PLANNED_POST("/v1/messages", "Answer by Anthropic's Messages API"),
    _LIST,
    _MODEL,
    _AZURE_CHAT,
    replace(
        _AZURE_CHAT,
        route="/openai/deployments/{deployment}/completions",
        summary=COMPLETIONS.summary,
        example=COMPLETIONS.example,
    ),
    replace(
        _AZURE_CHAT,
        route="/openai/deployments/{deployment}/embeddings",
        summary="Texts as vectors",
        group=RouteGroup.MODELS,
        example={"model": MODEL, "input": "A KV cache is"},
    ),
    replace(_RESPONSES, route="/openai/responses", description=AZURE),
    replace(_LIST, route="/openai/models", description=AZURE, query={}),
    replace(_MODEL, route="/openai/models/{model}", description=AZURE),
    _OTHER,
    replace(_OTHER, method="POST", body=RelayedBody, example={"model": MODEL, "input": "A KV cache is"}),
    replace(EXPLAIN, body=RelayedBody, errors=(500, 502)),
)
