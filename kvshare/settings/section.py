"""What all sections of the settings are: frozen, and without keys or types that are not declared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, PositiveInt

from kvshare.sizes import parse_size

_OFF = BeforeValidator(lambda value: "off" if value is False else value)  # as YAML reads a bare off
Mode = Annotated[Literal["off", "exact", "approx"], _OFF]

SIZE = BeforeValidator(
    lambda value: parse_size(value) if isinstance(value, str) else value, json_schema_input_type=int | str
)
"""A number of bytes may have a unit."""

Bytes = Annotated[NonNegativeInt, SIZE]
PositiveBytes = Annotated[PositiveInt, SIZE]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
