"""
The bodies of the two generating routes: which parameters are read, their types and ranges.

Unknown parameters pass, as OpenAI's clients send many; known ones must be right. A parameter that would
change the answer and is not implemented is refused. Each error names the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvshare.engines.base import SamplingParams
from kvshare.errors import RequestError, UnsupportedParameterError
from proxy.request_body import at_most
from proxy.request_options import KVShareField

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
_INT32 = 2**31 - 1
_SAMPLING = {"temperature", "top_p", "seed", "n", "presence_penalty", "frequency_penalty"}  # as in the engine
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


def _one_text(content: object) -> object:
    """Text, or a list of text parts joined to one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "expected a string or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError("content", 'expected content parts of type "text" only')
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "expected a string as the text of each part")
        texts.append(part["text"])
    return "".join(texts)


def _stop_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _token_ids(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and 0 <= number <= _INT32 for number in numbers):
        raise PydanticCustomError("prompt", "expected token ids, integers from 0 up")
    return tuple(numbers)


def _one_prompt(prompt: object) -> str | tuple[int, ...]:
    if not isinstance(prompt, str | list) or not prompt:
        raise PydanticCustomError("prompt", "expected text or token ids, not empty")
    if isinstance(prompt, list):
        return _token_ids(prompt)
    return prompt


def _prompt_list(prompt: object) -> list[str | tuple[int, ...]]:
    """Text, token ids, or a list of either, as a list of prompts."""
    if not isinstance(prompt, list) or (prompt and type(prompt[0]) is int):
        return [_one_prompt(prompt)]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise PydanticCustomError("prompt", f"expected 1 to {MAX_PROMPTS} prompts")
    return [_one_prompt(entry) for entry in prompt]


Text = Annotated[str, BeforeValidator(_one_text)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_stop_list), at_most(MAX_STOPS)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
LogitBias = Annotated[dict[BiasKey, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_BIASES)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class Message(_Body):
    """One message. A developer is a system by another name."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class GenerationBody(_Body):
    """What both generating routes read."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kvshare: KVShareField = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises RequestError."""
        _refuse_unsupported(self.model_extra or {}, _NEUTRAL)
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs 'stream': true.", param="stream_options")
        return self

    def _sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """What the body leaves out is as `SamplingParams` says."""
        given = self.model_dump(include=_SAMPLING, exclude_none=True)
        return SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            logprobs=logprobs,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            **given,
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_messages(self) -> Self:
        """Raises RequestError."""
        for number, message in enumerate(self.messages):
            _refuse_unsupported(message.model_extra or {}, _NEUTRAL_IN_MESSAGE, at=f"messages[{number}].")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        return self

    @property
    def sampling(self) -> SamplingParams:
        """`max_completion_tokens` wins over the older `max_tokens`."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[list[str | tuple[int, ...]], BeforeValidator(_prompt_list)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        """Raises UnsupportedParameterError."""
        if (self.model_extra or {}).get("best_of") not in (None, self.num_choices):
            raise UnsupportedParameterError("best_of", "only equal to 'n'")
        return self

    @property
    def sampling(self) -> SamplingParams:
        limit = _COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(max_tokens=limit, logprobs=self.logprobs)


# Parameters that this server does not implement and that would change the answer if it ignored them, each
# with the values that ask for nothing. Any other value is refused with `unsupported_parameter`: a client that
# asked for JSON or tools must not take prose for them. What only hints (`user`, `metadata`, `store`,
# `prompt_cache_key`, `service_tier` ...) is not here and passes.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    **dict.fromkeys(("audio", "web_search_options", "verbosity"), ()),
    "reasoning_effort": ("none",),
    "echo": (False,),
    "suffix": ("",),
    # vLLM's additions
    "top_k": (0, -1),
    **dict.fromkeys(("min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "structured_outputs", "chat_template"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
}

_NEUTRAL_IN_MESSAGE: dict[str, tuple[object, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


def _refuse_unsupported(
    given: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], at: str = ""
) -> None:
    """Raises UnsupportedParameterError for the first parameter of a body that asks for what is not there."""
    for name, accepted in neutral.items():
        value = given.get(name)
        if value is not None and not any(_same(value, entry) for entry in accepted):
            raise UnsupportedParameterError(f"{at}{name}", "not implemented by this server")


def _same(value: object, accepted: object) -> bool:
    """Whether two values are equal; true and 1 are not."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
