"""
The types of fields that several routes' bodies have, as tolerant as clients need.

Some clients write every number with a point (`4.0`), an absent list as `""`, and no limit as -1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from proxy.request_body import at_most
from proxy.wrong_values import wrong

MAX_STOPS = 16
MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_PROMPTS = 64
INT32 = 2**31 - 1
NO_LIMIT = -1  # of tokens
_MAX_QUOTED = 40  # characters of a key


def _whole(number: object) -> object:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _limit(number: int) -> int:
    if number == 0 or not NO_LIMIT <= number <= INT32:
        raise wrong(f"a number of tokens from 1 to {INT32}, or {NO_LIMIT} for no limit", number)
    return number


def _stops(stop: object) -> object:
    if isinstance(stop, str):
        return [stop] if stop else []
    if not isinstance(stop, list):
        raise wrong("a string or a list of strings", stop)
    return stop


def _seed(seed: int) -> int | None:
    """-1 asks for another one each time, as with vLLM."""
    return None if seed == -1 else seed


def _biases(biases: object) -> object:
    """Raises the error itself where a key is wrong: the entry has no field's name."""
    if not isinstance(biases, dict):
        raise wrong("an object of token ids and numbers", biases)
    for key in biases:
        if not (key.isascii() and key.isdigit() and int(key[:11]) <= INT32):
            words = {"most": INT32, "quoted": f"'{key[:_MAX_QUOTED]}'"}
            raise PydanticCustomError(
                "token_id_key",
                "expected token ids from 0 to {most} as keys, such as '50256', got {quoted}",
                words,
            )
    return biases


def _token_ids(numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, list):
        raise wrong("a list of token ids", numbers)
    for number in numbers:
        if type(number) is not int or not 0 <= number <= INT32:
            raise wrong(f"token ids, integers from 0 to {INT32}", number)
    return tuple(numbers)


def _one_prompt(prompt: object) -> str | tuple[int, ...]:
    if not isinstance(prompt, str | list) or not prompt:
        raise wrong("text or token ids, not empty", prompt)
    return _token_ids(prompt) if isinstance(prompt, list) else prompt


def _prompts(prompt: object) -> list[str | tuple[int, ...]]:
    """Text, token ids, or a list of either, as a list of prompts."""
    if not isinstance(prompt, list) or (prompt and type(prompt[0]) is int):
        return [_one_prompt(prompt)]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise wrong(f"1 to {MAX_PROMPTS} prompts", prompt)
    return [_one_prompt(entry) for entry in prompt]


Name = Annotated[str, Field(min_length=1, max_length=256)]
Whole = Annotated[int, BeforeValidator(_whole)]
TokenLimit = Annotated[int, AfterValidator(_limit), BeforeValidator(_whole)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(_seed), BeforeValidator(_whole)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_stops), at_most(MAX_STOPS)]
StopTokens = Annotated[list[Annotated[Whole, Field(ge=0, le=INT32)]], at_most(MAX_STOP_TOKENS)]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_token_ids)]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_biases), at_most(MAX_BIASES)
]
Prompts = Annotated[list[str | tuple[int, ...]], BeforeValidator(_prompts)]


class Body(BaseModel):
    """The base of all bodies. Unknown parameters pass, as OpenAI's clients send many."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)
