"""Embeds the texts of a client with the embedder of the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvshare.engine import Embeddings
from kvshare.errors import EngineError, ErrorCode, RequestError
from vector_index import EmbedderError

if TYPE_CHECKING:
    from vector_index import Embedder, TokenCount


def embeddings(embedder: Embedder, texts: Sequence[str]) -> Embeddings:
    """Embed texts. Raises RequestError, before any is embedded, for one that is too long; EngineError."""
    num_tokens = []
    try:
        for index, count in enumerate(embedder.count_tokens(texts)):
            if embedder.max_tokens is not None and count.num_tokens > embedder.max_tokens:
                param = "input" if len(texts) == 1 else f"input[{index}]"
                raise _too_long(param, count, embedder.max_tokens)
            num_tokens.append(count.num_tokens)
        return Embeddings(embedder.name, embedder.embed(texts), tuple(num_tokens))
    except EmbedderError as exc:
        raise EngineError(str(exc)) from exc


def _too_long(param: str, count: TokenCount, limit: int) -> RequestError:
    """Make the error in OpenAI's words."""
    number = f"at least {count.num_tokens}" if count.is_bound else count.num_tokens
    return RequestError(
        f"This model's maximum context length is {limit} tokens, however you requested {number} tokens "
        f"({number} in '{param}'; 0 for the completion). Please reduce your input.",
        param=param,
        code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    )
