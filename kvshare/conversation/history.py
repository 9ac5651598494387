"""From messages as OpenAI's clients send them to those that templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def template_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """
    The messages of a `Chat`.

    Raises:  RequestError naming the field, if a message has a shape that no template reads
    """
    raise NotImplementedError
