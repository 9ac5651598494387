"""The base of all sections of the settings: frozen, without keys or types that are not declared."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, PositiveInt

from kvshare.sizes import parse_size

_OFF = BeforeValidator(lambda value: "off" if value is False else value)  # as YAML reads a bare off
Mode = Annotated[Literal["off", "exact", "approx"], _OFF]


def size_of(number: object) -> BeforeValidator:
    """Let a number of bytes of this type have a unit."""
    return BeforeValidator(
        lambda value: parse_size(value) if isinstance(value, str) else value,
        json_schema_input_type=Union[number, str],  # noqa: UP007  a type that is known at run time only
    )


Bytes = Annotated[NonNegativeInt, size_of(NonNegativeInt)]
PositiveBytes = Annotated[PositiveInt, size_of(PositiveInt)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
