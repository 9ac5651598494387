"""What the bodies of the Messages and the Responses API are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Identifier = Annotated[str, Field(min_length=1, max_length=256)]  # of a call
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Part(BaseModel):
    """A part of a body. Members that are not declared pass, and null is the same as not there."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


def of_types(*types: str, default: str | None = None, hint: str) -> Callable[[object], object]:
    """A check of a part's `type`, which is `default` where it is not given; `hint` says the way out."""

    def check(part: object) -> object:
        if not isinstance(part, dict):
            return part
        if part.get("type") is None and default is not None:
            return {**part, "type": default}
        if part.get("type") not in types:
            names = ", ".join(f"'{name}'" for name in types)
            raise PydanticCustomError("part_type", f"expected a 'type' of {names}; {hint}")
        return part

    return check
