"""Images in bodies: which of them can be planned, and how vLLM renders them without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.relay.sanitize import with_members

_WITH_ADDRESS = ("image_url", "input_image")  # types of parts that have an address under `image_url`
_DATA = "data:"
_NO_TENSORS = {"mm_payload": b'"none"'}  # a member that only vLLM's `/render` has


def is_sent_image(part: Mapping[str, Any]) -> bool:
    """
    Return whether a part of a content is an image whose data is in the body.

    An image at an address is not planned: vLLM would fetch it twice, for the plan and for the answer.
    """
    kind = part.get("type")
    if kind in _WITH_ADDRESS:
        address = part.get("image_url")
        address = address.get("url") if isinstance(address, Mapping) else address
        return isinstance(address, str) and address[: len(_DATA)].lower() == _DATA
    source = part.get("source")
    return kind == "image" and isinstance(source, Mapping) and source.get("type") == "base64"


def holds_images(value: object) -> bool:
    """Return whether a body, or a part of one, has an image whose data is in the body."""
    if isinstance(value, list):
        return any(map(holds_images, value))
    if not isinstance(value, Mapping):
        return False
    names = ("messages", "input", "content", "output")
    return is_sent_image(value) or any(holds_images(value.get(name)) for name in names)


def without_tensors(body: bytes) -> bytes:
    """Return a body for `/render` that asks only for digests and places of media, not for their tensors."""
    return with_members(body, _NO_TENSORS)
