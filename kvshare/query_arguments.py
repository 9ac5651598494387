"""
Types of the arguments of an administrator's question, from a query string or from JSON.

They are stricter than pydantic's own: an eviction must not guess, and JSON's `true` is not a number.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def _digits(value: object) -> str:
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,16}", str(value)):
        raise PydanticCustomError("no_integer", "expected an integer")
    return str(value)


def _truth(value: object) -> str:
    if (text := str(value).lower()) not in ("true", "false", "1", "0"):
        raise PydanticCustomError("no_truth", "expected true or false")
    return text


Number = Annotated[int, BeforeValidator(_digits), Field(ge=1, le=2**53 - 1)]
Flag = Annotated[bool, BeforeValidator(_truth)]
Digest = Annotated[str, Field(min_length=4)]
"""The digest of a namespace, or its first digits."""
