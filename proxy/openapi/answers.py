"""
The shapes of answers, and of bodies that no other model checks, as /openapi.json has them. Clients may rely
on these members; others may be added. The server does not check its answers against them; tests do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from proxy.generate.models import TokenizeChatBody, TokenizeTextBody
from proxy.request_body import KVShareField


class _Shape(BaseModel):
    model_config = ConfigDict(defer_build=True)


_Fault = Annotated[str, Field(description="What is wrong: the field, what was expected, what was found.")]


class ErrorDetail(_Shape):
    message: _Fault
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None = Field(description="The parameter that is wrong.")
    code: str | None = Field(description="What it is, in a word.")


class ErrorAnswer(_Shape):
    """A refusal, or a failure. The last event of a stream that broke off has this shape too."""

    error: ErrorDetail


class AnthropicErrorDetail(_Shape):
    type: str
    message: _Fault


class AnthropicErrorAnswer(_Shape):
    """A refusal, or a failure, in the shape of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class LiveSettingsBody(RootModel[dict[str, str | float | bool | list[Any] | None]]):
    """Values by the paths of their settings, such as sharing.max_mode; null is as the files say."""


class AnyObject(RootModel[dict[str, Any]]):
    """An object of JSON, whose members depend on what was asked."""


class RelayedBody(_Shape):
    """What vLLM takes, and `kvshare`, which is not passed on. A client's `kv_transfer_params` are removed."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None,
        description="Only requests of the same key's space with the same salt share. vLLM gets another one.",
    )
    kvshare: KVShareField = None


class TokenizeEitherBody(RootModel[TokenizeTextBody | TokenizeChatBody]):
    """A chat if it has `messages`, else a text."""


class HealthAnswer(_Shape):
    status: Literal["ok"]


_Phase = Literal["ready", "failed", "starting", "draining"]


class ReadinessAnswer(_Shape):
    status: _Phase
    detail: str


class PartEntry(_Shape):
    part: str = Field(description="A word for it.")
    name: str | None = Field(None, description="Of a replica.")
    state: Literal["ok", "reduced", "off"]
    since: float = Field(description="Unix seconds.")
    remedy: str | None = Field(None, description="What to do about it.")


class PartsAnswer(_Shape):
    status: _Phase
    parts: list[PartEntry]


class ModelAnswer(_Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Tokens of a prompt and its answer together.")


class ModelListAnswer(_Shape):
    object: Literal["list"]
    data: list[ModelAnswer]


class CachedTokens(_Shape):
    cached_tokens: int = Field(description="Tokens whose KV was reused.")


class KVShareUsage(_Shape):
    """Where the KV of the prompt came from; the four counts add up to its tokens."""

    exact: int
    copied: int
    recomputed: int
    repaired: int
    decision: str
    reason: str | None
    expected_deviation: float | None
    max_deviation: float | None


class UsageEntry(_Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    kvshare: KVShareUsage


class _Choice(_Shape):
    index: int
    logprobs: dict[str, Any] | None = None
    finish_reason: str


class ChatMessageEntry(_Shape):
    role: Literal["assistant"]
    content: str | None


class ChatChoiceEntry(_Choice):
    message: ChatMessageEntry


class CompletionChoiceEntry(_Choice):
    text: str


class _Generated(_Shape):
    id: str
    created: int
    model: str
    usage: UsageEntry


class ChatCompletionAnswer(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoiceEntry]


class CompletionAnswer(_Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoiceEntry]


class ResponsesAnswer(_Shape):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    output: list[dict[str, Any]] = Field(description="Messages, thoughts and calls of functions.")
    usage: dict[str, Any] | None = None


class MessagesAnswer(_Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks of text, thoughts and tool uses.")
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCountAnswer(_Shape):
    input_tokens: int


class EmbeddingEntry(_Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(
        description="With `encoding_format` base64 the bytes of little-endian float32."
    )


class EmbeddingUsage(_Shape):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(_Shape):
    object: Literal["list"]
    model: str
    data: list[EmbeddingEntry]
    usage: EmbeddingUsage


class TokensAnswer(_Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedAnswer(_Shape):
    prompt: str


class VersionAnswer(_Shape):
    version: str
