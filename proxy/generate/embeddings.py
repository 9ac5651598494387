"""POST /v1/embeddings: texts as vectors, by the embedder that finds similar prompts."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from kvshare.errors import ModelNotFoundError, UnsupportedParameterError
from proxy.generate.fields import Body, Whole
from proxy.generate.requests import ENGINE
from proxy.request_body import at_most, read_object, validated
from proxy.wrong_values import wrong

MAX_TEXTS = 2048  # as with OpenAI


def _texts(given: object) -> object:
    """Token ids would be of a vocabulary that client and server would have to agree on: refused."""
    texts = given if isinstance(given, list) else [given]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise wrong("text or a list of texts, none of them empty; token ids are not taken", given)
    return texts


class EmbeddingBody(Body):
    """POST /v1/embeddings"""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    input: Annotated[list[str], BeforeValidator(_texts), at_most(MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings. `model` is the embedder's name, or that of the model beside it."""
    engine = request.app[ENGINE]
    body = validated(EmbeddingBody, await read_object(request))
    found = await engine.embed(body.input)
    if body.model not in (found.model, engine.card.model_id):
        raise ModelNotFoundError(body.model, served=found.model)
    dimension = found.vectors.shape[1]
    if body.dimensions not in (None, dimension):
        raise UnsupportedParameterError("dimensions", f"only {dimension}, as many as the embedder gives")
    encode = _base64 if body.encoding_format == "base64" else _floats
    data = [
        {"object": "embedding", "index": index, "embedding": encode(vector)}
        for index, vector in enumerate(found.vectors)
    ]
    num_tokens = sum(found.num_tokens)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return web.json_response({"object": "list", "data": data, "model": found.model, "usage": usage})


def _floats(vector: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: NDArray[np.float32]) -> str:
    """OpenAI's clients ask for it by default: the bytes of little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
