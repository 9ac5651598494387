"""Converts messages from OpenAI's clients to those that templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvshare.errors import RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KINDS = {
    type(None): "nothing",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """
    Return the messages of a `Chat`: each content is one string, and arguments of calls are objects.

    The role "developer" becomes "system". If an assistant's message has no content, its refusal is used. A
    tool's name, if it is missing, is that of the call it answers. Other fields are left out.

    Raises:  RequestError with the name of the field, if a message does not follow OpenAI's API
    """
    names: dict[str, str] = {}  # of the functions called so far, by the call's id
    result = []
    for number, message in enumerate(messages):
        at = f"messages[{number}]"
        read = _message(message, at)
        for call in read.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if read["role"] == "tool":
            read = {"name": names.get(read["tool_call_id"], ""), **read}
        result.append(read)
    return tuple(result)


def _message(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{at}.role", role, f"one of {', '.join(_ROLES)}")
    read: dict[str, Any] = {"role": _ROLES[role], "content": _content(message, at)}
    if message.get("name") is not None:
        read["name"] = _string(message, "name", at)
    if role == "assistant" and (calls := message.get("tool_calls")):
        if not isinstance(calls, list):
            _refuse(f"{at}.tool_calls", calls, "a list of calls")
        read["tool_calls"] = [_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(calls)]
    if role == "tool":
        read["tool_call_id"] = _string(message, "tool_call_id", at)
    return read


def _content(message: Mapping[str, Any], at: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return _string(message, "refusal", at) if message.get("refusal") is not None else ""
    if isinstance(content, list):
        return "".join(_part(part, f"{at}.content[{number}]") for number, part in enumerate(content))
    return _refuse(f"{at}.content", content, "a string or a list of text parts")


def _part(part: object, at: str) -> str:
    if not isinstance(part, Mapping):
        return _refuse(at, part, 'an object with a "type"')
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        return _refuse(f"{at}.type", kind, '"text": this server reads no other content')
    return _string(part, kind, at)


def _call(call: object, at: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        _refuse(at, call, 'an object with "id" and "function"')
    if call.get("type", "function") != "function":
        _refuse(f"{at}.type", call["type"], '"function": this server knows no other tools')
    function = call.get("function")
    if not isinstance(function, Mapping):
        _refuse(f"{at}.function", function, 'an object with "name" and "arguments"')
    inner = f"{at}.function"
    read = {"name": _string(function, "name", inner), "arguments": _arguments(function, inner)}
    return {"id": _string(call, "id", at), "type": "function", "function": read}


def _arguments(function: Mapping[str, Any], at: str) -> object:
    """Return the object in the JSON text, an empty one for an empty text. Other text is returned as it is."""
    text = _string(function, "arguments", at)
    try:
        arguments = json.loads(text.strip() or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _string(fields: Mapping[str, Any], key: str, at: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        _refuse(f"{at}.{key}", value, "a string")
    return value


def _refuse(param: str, value: object, expected: str) -> NoReturn:
    """Raises RequestError. It quotes short roles and types only: other values may be prompt text."""
    is_name = param.endswith((".role", ".type")) and isinstance(value, str) and len(value) <= 32
    shown = repr(value) if is_name else _KINDS.get(type(value), "an object")
    quoted = [shown] if is_name else []
    raise RequestError(f"'{param}': found {shown}; expected {expected}.", param=param, quoted=quoted)
