"""
The bodies of `/v1/chat/completions` and `/v1/completions`: which parameters are read, their types and ranges.

Unknown parameters pass; known ones must be right. A parameter that would change the answer and is not
implemented is refused. Each error names the parameter. The JSON schema that an answer must follow is given as
`response_format`, or by vLLM's names for the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from kvshare.engine import SamplingParams
from kvshare.errors import RequestError, UnsupportedParameterError
from proxy.cache_salt import CacheSalt
from proxy.generate.chat.template import TemplateBody
from proxy.generate.fields import (
    INT32,
    NO_LIMIT,
    Body,
    LogitBias,
    Name,
    Prompts,
    Seed,
    Stops,
    StopTokens,
    TokenLimit,
    Whole,
)
from proxy.generate.unsupported import CHAT, COMPLETIONS, UnsupportedParameters
from proxy.request_body import KVShareField
from proxy.wrong_values import found, invalid

MAX_CHOICES = 8
MAX_LOGPROBS = 20
_SAMPLING = {  # passed to the engine as they are
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "n", "min_tokens", "ignore_eos", "skip_special_tokens"),
}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(Body):
    """The fields that both generating routes read. `api`: the route's table of what is not implemented."""

    unsupported: ClassVar[UnsupportedParameters]

    model: Name
    max_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=INT32)] | None = None
    ignore_eos: bool | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokens | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    structured_outputs: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kvshare: KVShareField = None
    cache_salt: CacheSalt = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        return _answer_schema(self.response_format, self.guided_json, self.structured_outputs)

    @property
    def answer_param(self) -> str:
        own = {"guided_json": self.guided_json, "structured_outputs": self.structured_outputs}
        return next((name for name, given in own.items() if given is not None), "response_format")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises RequestError."""
        self.unsupported.refuse(self.model_extra or {})
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs 'stream': true.", param="stream_options")
        return self

    def _sampling(self, *, limit: int | None, logprobs: int | None) -> SamplingParams:
        """`limit`: of tokens. What the body leaves out is as `SamplingParams` says. Raises RequestError."""
        max_tokens = None if limit == NO_LIMIT else limit
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            expected = f"expected at most 'max_tokens', which is {max_tokens}"
            raise invalid("min_tokens", f"{expected}, got {self.min_tokens}")
        return SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            top_k=None if self.top_k is None else max(0, self.top_k),
            logprobs=logprobs,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            **self.model_dump(include=_SAMPLING, exclude_none=True),
        )


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions"""

    unsupported = CHAT

    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        """Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        return self

    @property
    def sampling(self) -> SamplingParams:
        """`max_completion_tokens` wins over the older `max_tokens`. Raises RequestError."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling(limit=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    unsupported = COMPLETIONS

    prompt: Prompts
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Whole | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_extras(self) -> Self:
        """Raises UnsupportedParameterError."""
        if self.best_of not in (None, self.num_choices):
            raise UnsupportedParameterError("best_of", f"only equal to 'n', which is {self.num_choices}")
        if self.echo and self.logprobs is not None:
            raise UnsupportedParameterError("echo", "not with 'logprobs', as the prompt's are not computed")
        return self

    @property
    def sampling(self) -> SamplingParams:
        """Raises RequestError."""
        limit = _COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(limit=limit, logprobs=self.logprobs)


def _answer_schema(
    response_format: object, guided_json: object, structured_outputs: object
) -> Mapping[str, Any] | None:
    """
    None: any text.

    Raises:  RequestError if a format has no known form, or if there is more than one
    """
    schemas = {
        "response_format": _response_format(response_format),
        "guided_json": _schema("guided_json", guided_json),
        "structured_outputs": _structured_outputs(structured_outputs),
    }
    given_schemas = {param: schema for param, schema in schemas.items() if schema is not None}
    if len(given_schemas) > 1:
        *_, last = given_schemas
        names = " and ".join(f"'{param}'" for param in given_schemas)
        raise RequestError(f"Send only one of {names}: each is the answer's format.", param=last)
    return next(iter(given_schemas.values()), None)


def _response_format(given: object) -> Mapping[str, Any] | None:
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return _schema("response_format.json_schema.schema", schema)
        case {"type": "json_schema"}:
            raise invalid("response_format.json_schema", "expected an object with 'schema', a JSON schema")
    raise invalid("response_format.type", "expected 'text', 'json_object' or 'json_schema'")


def _structured_outputs(outputs: object) -> Mapping[str, Any] | None:
    """Read those two of vLLM's constraints that ask for JSON."""
    if outputs is None:
        return None
    if not isinstance(outputs, dict):
        raise invalid("structured_outputs", f"expected an object, got {found(outputs)}")
    for name in ("regex", "choice", "grammar", "structural_tag"):
        if outputs.get(name) is not None:
            raise UnsupportedParameterError(
                f"structured_outputs.{name}", "this server knows 'json' and 'json_object' only"
            )
    if outputs.get("json_object"):
        return _ANY_OBJECT
    return _schema("structured_outputs.json", outputs.get("json"))


def _schema(param: str, schema: object) -> Mapping[str, Any] | None:
    """A schema as an object or as its JSON text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid(param, "expected a JSON schema, got a string that is not JSON") from None
    if schema is None or isinstance(schema, dict):
        return schema
    raise invalid(param, f"expected a JSON schema, got {found(schema)}")
