"""
Messages as JSON: a message is a dataclass, and a received document is checked against its field types.

Values are never converted: a number is not a text, and true is not a number. Defaults serve the sender only;
a received message must have every field that is not in `_optional`. Unknown fields are ignored.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from delta_tree import SegmentId

Text = Annotated[str, Field(strict=True, min_length=1)]
Number = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Held = Annotated[SegmentId, Field(strict=True, gt=0)]


class WireError(ValueError):
    """A received message is wrong; names the field and what was expected."""


class Message:
    """Base of the dataclasses that are sent as JSON objects."""

    __slots__ = ()
    _optional: ClassVar[frozenset[str]] = frozenset()  # fields that may be missing
    _protocol: ClassVar[int | None] = None  # version of the protocol, if the document has one

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return document if self._protocol is None else {"protocol": self._protocol, **document}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Raises WireError, which does not quote the received value."""
        try:
            message: Self = _adapter(cls).validate_python(document)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or cls.__name__
            raise WireError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None
        return message

    @model_validator(mode="before")
    @classmethod
    def _check_complete(cls, document: object) -> object:
        if isinstance(document, dict):
            if cls._protocol is not None and document.get("protocol") != cls._protocol:
                raise ValueError(f"protocol: expected {cls._protocol}, got {document.get('protocol')!r}")
            keys = {each.name for each in fields(cls)}  # type: ignore[arg-type]  # they are dataclasses
            if missing := keys - cls._optional - document.keys():
                raise ValueError(f"missing: {', '.join(sorted(missing))}")
        return document


_ADAPTERS: dict[type[Message], TypeAdapter[Any]] = {}


def _adapter(kind: type[Message]) -> TypeAdapter[Any]:
    """Built once for each kind of message, at its first use."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
