"""
Parts of contents, where clients put media: their ids are removed, and embeddings in their place are refused.

For vLLM two media with one `uuid` are the same, also those of two clients. Embeddings it takes, with a
connector, even if its operator did not allow that, and those of a wrong shape end it.

A part is an object in a list, or in lists of lists, under the name `content` or `output`, of an object in one
of PROMPTS or of another part. vLLM's routes below /v1 read the media of chats, responses and rankings there,
and nowhere else. So arguments and schemas of tools, `metadata` and a `state` keep a `uuid`, and texts say
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

from kvshare.errors import RequestError

# Members of a body that hold messages, items of a response, or what is compared or ranked.
PROMPTS = (
    *("messages", "input", "previous_input_messages"),
    *("query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2"),
)
_OF_CHATS = ("messages",)  # their `documents` are texts of the client's, which only the template sees
_CHATS = ("/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/batch")
_CONTENTS = frozenset({"content", "output"})  # of a message or a result, and of what a tool returned
_EMBEDDINGS = ("image_embeds", "audio_embeds", "video_embeds")  # types of parts, and names in them
_ID = "uuid"


def without_media_ids(document: Mapping[str, Any], *, path: str) -> Mapping[str, Any]:
    """
    A body to this route of vLLM whose parts of contents have no ids; the very object if none has one.

    Raises RequestError for embeddings, RecursionError for a body that is nested too deeply.
    """
    names = _OF_CHATS if path in _CHATS else PROMPTS
    found = {name: _clean(document[name], param=name) for name in names if name in document}
    is_same = all(value is document[name] for name, value in found.items())
    return document if is_same else {**document, **found}


def _clean(value: Any, *, param: str, are_parts: bool = False) -> Any:
    """`are_parts`: whether objects in a list are parts. The same object if nothing in it has to go."""
    if isinstance(value, dict):
        return _clean_object(value, param=param, is_part=False)
    if not isinstance(value, list):
        return value
    found = value.copy()
    for index, entry in enumerate(value):  # most of them are tokens, if they are many
        if isinstance(entry, dict):
            found[index] = _clean_object(entry, param=param, is_part=are_parts)
        elif isinstance(entry, list):
            found[index] = _clean(entry, param=param, are_parts=are_parts)
    return value if all(map(is_, found, value)) else found


def _clean_object(value: dict[str, Any], *, param: str, is_part: bool) -> dict[str, Any]:
    """A message, an item or a part. A part is one of embeddings by its type, or by any of its names."""
    for word in (value.get("type"), *value) if is_part else ():
        if word in _EMBEDDINGS:
            raise RequestError(f"Unsupported content: {word!r}. Send the media itself.", param=param)
    found = {
        name: _clean(member, param=param, are_parts=True) if name in _CONTENTS else member
        for name, member in value.items()
        if not (is_part and name == _ID)
    }
    is_same = len(found) == len(value) and all(found[name] is value[name] for name in found)
    return value if is_same else found
