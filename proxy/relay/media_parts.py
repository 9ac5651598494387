"""
Parts of contents, where clients put media: ids of media are removed, embeddings in their place are refused.

vLLM takes two media with one `uuid` for the same, even if two clients sent them. With a connector, vLLM
accepts embeddings even if its operator has not allowed them, and those of a wrong shape make it crash.

A part is an object in a list (or in lists of lists) under the name `content` or `output`, of an object in one
of PROMPTS or of another part. vLLM's routes below /v1 read the media of chats, responses and rankings there,
and nowhere else. So a `uuid` in arguments and schemas of tools, `metadata` or a `state` stays, and so do all
texts.
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
_OF_CHATS = ("messages",)  # the `documents` of a chat are texts that only the template reads
_CHATS = ("/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/batch")
_CONTENTS = frozenset({"content", "output"})  # of a message or a result, and of what a tool returned
_EMBEDDINGS = ("image_embeds", "audio_embeds", "video_embeds")  # types of parts, and members of parts
_ID = "uuid"


def without_media_ids(document: Mapping[str, Any], *, path: str) -> Mapping[str, Any]:
    """
    Return a body for this route of vLLM without ids in parts of contents; the same object if there are none.

    Raises RequestError for embeddings, RecursionError for a body that is nested too deeply.
    """
    names = _OF_CHATS if path in _CHATS else PROMPTS
    found = {name: _clean(document[name], param=name) for name in names if name in document}
    is_same = all(value is document[name] for name, value in found.items())
    return document if is_same else {**document, **found}


def _clean(value: Any, *, param: str, are_parts: bool = False) -> Any:
    """Remove ids. `are_parts`: objects in a list are parts. Returns the same object if nothing changes."""
    if isinstance(value, dict):
        return _clean_object(value, param=param, is_part=False)
    if not isinstance(value, list):
        return value
    cleaned = value.copy()
    for index, entry in enumerate(value):  # a long list usually has tokens, which are skipped
        if isinstance(entry, dict):
            cleaned[index] = _clean_object(entry, param=param, is_part=are_parts)
        elif isinstance(entry, list):
            cleaned[index] = _clean(entry, param=param, are_parts=are_parts)
    return value if all(map(is_, cleaned, value)) else cleaned


def _clean_object(value: dict[str, Any], *, param: str, is_part: bool) -> dict[str, Any]:
    """Remove ids from a message, an item or a part. A part's type or any member marks embeddings."""
    for word in (value.get("type"), *value) if is_part else ():
        if word in _EMBEDDINGS:
            raise RequestError(f"Unsupported content: {word!r}. Send the media itself.", param=param)
    cleaned = {
        name: _clean(member, param=param, are_parts=True) if name in _CONTENTS else member
        for name, member in value.items()
        if not (is_part and name == _ID)
    }
    is_same = len(cleaned) == len(value) and all(cleaned[name] is value[name] for name in cleaned)
    return value if is_same else cleaned
