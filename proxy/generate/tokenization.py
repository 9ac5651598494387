"""POST /tokenize and /detokenize, in vLLM's shapes: the very tokens that a prompt has here."""

from __future__ import annotations

from aiohttp import web

from kvshare.engines.base import GeneratingEngine
from kvshare.errors import UnsupportedParameterError
from kvshare.requests import Prompt
from proxy.generate.chat.template import TemplateBody
from proxy.generate.fields import Body, TokenIds
from proxy.generate.requests import ENGINE, check_model, read_body
from proxy.request_body import read_object, validated


class TokenizeBody(Body):
    """What a text and a chat have in common."""

    model: str | None = None  # None: the one that is served
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeTextBody(TokenizeBody):
    """A text, as /v1/completions would read it."""

    prompt: str

    async def encode(self, engine: GeneratingEngine) -> Prompt:
        """Raises RequestError."""
        if self.add_special_tokens is False:
            raise UnsupportedParameterError("add_special_tokens", "a text has them, as in /v1/completions")
        return await engine.encode_text(self.prompt)


class TokenizeChatBody(TokenizeBody, TemplateBody):
    """A chat, as /v1/chat/completions would read it."""

    async def encode(self, engine: GeneratingEngine) -> Prompt:
        """Raises RequestError."""
        if self.add_special_tokens:
            raise UnsupportedParameterError("add_special_tokens", "those of a chat are in its template")
        return await engine.encode_chat(self.chat)


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
    ids = (await body.encode(engine)).token_ids.tolist()
    texts = [await engine.decode_tokens([token]) for token in ids] if body.return_token_strs else None
    return web.json_response(
        {"count": len(ids), "max_model_len": engine.card.max_model_len, "tokens": ids, "token_strs": texts}
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize"""
    body = await read_body(request, DetokenizeBody)
    return web.json_response({"prompt": await request.app[ENGINE].decode_tokens(body.tokens)})
