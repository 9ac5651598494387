"""
The routes about the model, which generate nothing: its name, its tokens, and texts as vectors by the embedder
that finds similar prompts.

/tokenize and /detokenize have vLLM's shapes, and give the very tokens that a prompt has here.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal, Self

from aiohttp import web
from pydantic import BeforeValidator, model_validator

import kvshare
from kvshare.engine import GeneratingEngine
from kvshare.errors import ModelNotFoundError, UnsupportedParameterError
from proxy.anthropic_models import model_of, page_of
from proxy.errors import speaks_anthropic
from proxy.generate.chat.template import TemplateBody
from proxy.generate.fields import Body, Name, TokenIds, Whole
from proxy.generate.requests import ENGINE, check_model, read_body
from proxy.generate.unsupported import EMBEDDINGS
from proxy.request_body import at_most, read_object, validated
from proxy.wrong_values import wrong

MAX_TEXTS = 2048  # as with OpenAI


async def served(request: web.Request) -> web.Response:
    cards = [_card(request.app[ENGINE])]
    if speaks_anthropic(request):
        return web.json_response(page_of(cards, request.query))
    return web.json_response({"object": "list", "data": cards})


async def served_by_name(request: web.Request) -> web.Response:
    check_model(request.app[ENGINE], request.match_info["model"].rstrip("/"))
    card = _card(request.app[ENGINE])
    return web.json_response(model_of(card) if speaks_anthropic(request) else card)


async def version(request: web.Request) -> web.Response:
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


class TokenizeBody(Body):
    """The common fields of a text and a chat."""

    model: str | None = None  # None: the one that is served
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeTextBody(TokenizeBody):
    """A text, as /v1/completions would read it."""

    prompt: str


class TokenizeChatBody(TokenizeBody, TemplateBody):
    """A chat, as /v1/chat/completions would read it."""


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: of a chat where the body has messages, else of a text."""
    engine, document = request.app[ENGINE], await read_object(request)
    is_text = document.get("messages") is None
    body = validated(TokenizeTextBody, document) if is_text else validated(TokenizeChatBody, document)
    check_model(engine, body.model)
    param = "add_special_tokens"
    if isinstance(body, TokenizeTextBody):
        if body.add_special_tokens is False:
            raise UnsupportedParameterError(param, "a text has them, as in /v1/completions")
        prompt = await engine.encode_text(body.prompt)
    else:
        if body.add_special_tokens:
            raise UnsupportedParameterError(param, "those of a chat are in its template")
        prompt = await engine.encode_chat(body.chat)
    ids = prompt.token_ids.tolist()
    texts = [await engine.decode_tokens([token]) for token in ids] if body.return_token_strs else None
    return web.json_response(
        {"count": len(ids), "max_model_len": engine.card.max_model_len, "tokens": ids, "token_strs": texts}
    )


async def detokenize(request: web.Request) -> web.Response:
    body = await read_body(request, DetokenizeBody)
    return web.json_response({"prompt": await request.app[ENGINE].decode_tokens(body.tokens)})


def _texts(value: object) -> object:
    if not value or not isinstance(value, str | list):
        raise wrong("text or a list of texts, none of them empty", value)
    return [value] if isinstance(value, str) else value


def _text(value: object) -> object:
    """Token ids would be of a vocabulary that client and server would have to agree on: refused."""
    if not value or not isinstance(value, str):
        raise wrong("text that is not empty; token ids are not taken", value)
    return value


class EmbeddingBody(Body):
    """POST /v1/embeddings"""

    model: Name
    input: Annotated[
        list[Annotated[str, BeforeValidator(_text)]], BeforeValidator(_texts), at_most(MAX_TEXTS)
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises UnsupportedParameterError."""
        EMBEDDINGS.refuse(self.model_extra or {})
        return self


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings. `model` is the embedder's name, or that of the served model."""
    engine = request.app[ENGINE]
    body = validated(EmbeddingBody, await read_object(request))
    embedded = await engine.embed(body.input)
    if body.model not in (embedded.model, engine.card.model_id):
        raise ModelNotFoundError(body.model, served=embedded.model)
    dimension = embedded.vectors.shape[1]
    if body.dimensions not in (None, dimension):
        raise UnsupportedParameterError("dimensions", f"only {dimension}, as many as the embedder gives")
    vectors: list[str] | list[list[float]]
    if body.encoding_format == "base64":  # OpenAI's clients ask for it by default: little-endian float32
        vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in embedded.vectors]
    else:
        vectors = embedded.vectors.tolist()
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
    ]
    num_tokens = sum(embedded.num_tokens)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return web.json_response({"object": "list", "data": data, "model": embedded.model, "usage": usage})
