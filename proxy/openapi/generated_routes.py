"""The routes that answer with the model in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.messages.bodies import CountTokensBody, MessagesBody
from proxy.generate.models import DetokenizeBody, EmbeddingBody
from proxy.generate.responses.bodies import ResponsesBody
from proxy.openapi.answers import (
    AnthropicErrorAnswer,
    AnyObject,
    ChatCompletionAnswer,
    CompletionAnswer,
    DetokenizedAnswer,
    EmbeddingsAnswer,
    ErrorAnswer,
    MessagesAnswer,
    ModelAnswer,
    ModelListAnswer,
    ResponsesAnswer,
    TokenCountAnswer,
    TokenizeEitherBody,
    TokensAnswer,
    VersionAnswer,
)
from proxy.openapi.operation import (
    EVENTS,
    JSON,
    MODEL,
    Operation,
    RouteAccess,
    RouteAnswer,
    RouteGroup,
    RouteParameter,
    number,
    one_of,
    text,
)

_POST = partial(Operation, "POST", group=RouteGroup.GENERATE)
_MODELS = partial(Operation, group=RouteGroup.MODELS)
_QUESTION: Mapping[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is a KV cache?"}],
}
_IGNORED = (
    "Parameters that are not listed are ignored where they do not change the answer, and refused otherwise. "
    "The headers `Cache-Control: no-cache` and `no-store` are as `kvshare` with mode `off` and with "
    "`no_store`."
)
_AS_IN_CHATS = "Parameters are treated as in chat completions."
TWO_FORMS = (
    "A request with the header `anthropic-version` gets Anthropic's form, page by page, and its errors."
)
AZURE = (
    "As below /v1, by the path that AzureOpenAI of the openai package asks for. The query's api-version is "
    "ignored."
)
DEPLOYMENT = {"deployment": text("The model's name; counts before the body's.", example=MODEL)}
ONE_MODEL = {"model": text("Its name.", example=MODEL)}
PAGE = {
    "limit": number("In Anthropic's form: at most so many.", maximum=1000, default=20),
    "after_id": RouteParameter("In Anthropic's form: the models after this one.", {"type": "string"}),
    "before_id": RouteParameter("In Anthropic's form: the models before this one.", {"type": "string"}),
}

CHAT = _POST(
    "/v1/chat/completions",
    "Answer a conversation",
    {200: RouteAnswer("The answer; with `stream` its pieces.", {JSON: ChatCompletionAnswer, EVENTS: None})},
    description=_IGNORED,
    body=ChatBody,
    errors=(404, 429, 500),
    example={**_QUESTION, "max_tokens": 64},
)
COMPLETIONS = _POST(
    "/v1/completions",
    "Continue texts",
    {200: RouteAnswer("The answers; with `stream` their pieces.", {JSON: CompletionAnswer, EVENTS: None})},
    description=_IGNORED,
    body=CompletionBody,
    errors=(404, 429, 500),
    example={"model": MODEL, "prompt": "A KV cache is", "max_tokens": 16},
)
_RESPONSES = _POST(
    "/v1/responses",
    "Answer a conversation, by the Responses API",
    {200: RouteAnswer("The answer; with `stream` its events.", {JSON: ResponsesAnswer, EVENTS: None})},
    description="Nothing is stored. Parameters are treated as in chat completions.",
    body=ResponsesBody,
    errors=(404, 429, 500),
    example={"model": MODEL, "input": "What is a KV cache?", "max_output_tokens": 64},
)
_MESSAGES = _POST(
    "/v1/messages",
    "Answer a conversation, by Anthropic's Messages API",
    {200: RouteAnswer("The answer; with `stream` its events.", {JSON: MessagesAnswer, EVENTS: None})},
    description=_AS_IN_CHATS,
    body=MessagesBody,
    errors=(404, 429, 500),
    error=AnthropicErrorAnswer,
    example={**_QUESTION, "max_tokens": 64},
)
_EMBEDDINGS = _MODELS(
    "POST",
    "/v1/embeddings",
    "Texts as vectors",
    {200: RouteAnswer("A vector for each text.", {JSON: EmbeddingsAnswer})},
    description="By the embedder that finds similar prompts.",
    body=EmbeddingBody,
    errors=(404, 500),
    example={"model": MODEL, "input": ["A KV cache is"]},
)
_LIST = _MODELS(
    "GET",
    "/v1/models",
    "The model that is served",
    {200: RouteAnswer("A list of one.", {JSON: ModelListAnswer})},
    description=TWO_FORMS,
    query=PAGE,
)
_MODEL = _MODELS(
    "GET",
    "/v1/models/{model}",
    "The same by its name",
    {200: RouteAnswer("It is served.", {JSON: ModelAnswer})},
    path=ONE_MODEL,
    errors=(404,),
)
EXPLAIN = Operation(
    "POST",
    "/admin/explain",
    "The plan that a request would get",
    {200: RouteAnswer("The answer.", {JSON: AnyObject})},
    RouteGroup.OPERATORS,
    description="For the namespace of the key that asks, or of another. Nothing is computed. The body is "
    "that of the API.",
    access=RouteAccess.ADMIN,
    query={
        "api": one_of(("chat", "completions", "responses", "messages"), "The API of the request."),
        "tenant": text("Plan as for this tenant, by its name."),
        "key": text("Plan as for the key with this name."),
        "texts": RouteParameter(
            "Whether spans have the text of the prompt, which is the caller's own; not in front of vLLM.",
            {"type": "boolean", "default": False},
        ),
    },
    body=ChatBody,
    errors=(404, 500),
    example=_QUESTION,
)
AZURE_CHAT = replace(
    CHAT, route="/openai/deployments/{deployment}/chat/completions", description=AZURE, path=DEPLOYMENT
)

GENERATED_ROUTES = (
    CHAT,
    COMPLETIONS,
    _RESPONSES,
    Operation(
        "GET",
        "/v1/responses/{path}",
        "Not here, whatever the method",
        {404: RouteAnswer("No responses are stored.", {JSON: ErrorAnswer})},
        RouteGroup.GENERATE,
        path={"path": text("A response's id.", example="resp_1")},
    ),
    _MESSAGES,
    _POST(
        "/v1/messages/count_tokens",
        "Count the tokens of a prompt",
        {200: RouteAnswer("The count.", {JSON: TokenCountAnswer})},
        body=CountTokensBody,
        errors=(404, 500),
        error=AnthropicErrorAnswer,
        example=_QUESTION,
    ),
    _EMBEDDINGS,
    _MODELS(
        "POST",
        "/tokenize",
        "The tokens of a text or a chat",
        {200: RouteAnswer("The tokens.", {JSON: TokensAnswer})},
        body=TokenizeEitherBody,
        errors=(404, 500),
        example={"prompt": "A KV cache is"},
    ),
    _MODELS(
        "POST",
        "/detokenize",
        "The text of tokens",
        {200: RouteAnswer("The text.", {JSON: DetokenizedAnswer})},
        body=DetokenizeBody,
        errors=(404, 500),
        example={"tokens": [65, 66]},
    ),
    Operation(
        "GET",
        "/version",
        "The version that runs",
        {200: RouteAnswer("KVShare's.", {JSON: VersionAnswer})},
        RouteGroup.ABOUT,
    ),
    _LIST,
    _MODEL,
    AZURE_CHAT,
    replace(
        COMPLETIONS, route="/openai/deployments/{deployment}/completions", description=AZURE, path=DEPLOYMENT
    ),
    replace(
        _EMBEDDINGS, route="/openai/deployments/{deployment}/embeddings", description=AZURE, path=DEPLOYMENT
    ),
    replace(_RESPONSES, route="/openai/responses", description=AZURE),
    replace(_LIST, route="/openai/models", description=AZURE, query={}),
    replace(_MODEL, route="/openai/models/{model}", description=AZURE),
    EXPLAIN,
)
