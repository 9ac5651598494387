"""What all sections of the settings are: frozen, and without keys or types that are not declared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

_OFF = BeforeValidator(lambda value: "off" if value is False else value)  # as YAML reads a bare off
Mode = Annotated[Literal["off", "exact", "approx"], _OFF]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
