"""Reads `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

import json
import re

from kvshare.conversation.formats.json_value import refuse_constant
from kvshare.conversation.formats.reader import CallReader, Calls, Cursor, Steps, Waiting
from kvshare.conversation.parameters import Parameters

_NAME = re.compile(r"[^<>\n]*")
_WORDS = {  # JSON by the lowercase word, as JSON or Python write it
    "boolean": {"true": "true", "false": "false"},
    "null": {"null": "null", "none": "null"},
}
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


class QwenXmlReader(CallReader):
    """`tools` define the types of parameters; a parameter that they do not describe is a string."""

    markers = ("<tool_call>", "<function=")

    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        if marker == "<tool_call>" and not (yield from cursor.accept_after_space("<function=")):
            return False
        name = yield from _take_name(cursor)
        if name is None:
            return False
        yield calls.begin(name)
        cursor.drop()
        tools = {tool["function"]["name"]: tool for tool in self._tools}
        yield from self._read_parameters(cursor, calls, Parameters(tools.get(name, {})))
        yield from cursor.accept_after_space("</tool_call>")
        return True

    def _read_parameters(self, cursor: Cursor, calls: Calls, parameters: Parameters) -> Steps[None]:
        opening = "{"
        while (key := (yield from _take_key(cursor))) is not None:
            types = parameters.types(key)
            value = yield from cursor.take_until("</parameter>")
            if value is None:  # the answer ends inside the value
                yield calls.arguments(
                    f"{opening}{json.dumps(key)}: {_cut_off(cursor.text[cursor.at :], types)}"
                )
                return
            # Without the line breaks after the opening tag and before the closing tag.
            value = value.removeprefix("\n").removesuffix("\n")
            yield calls.arguments(f"{opening}{json.dumps(key)}: {_as_json(value, types)}")
            cursor.drop()
            opening = ", "
        if (yield from cursor.accept_after_space("</function>")):
            yield calls.arguments("{}" if opening == "{" else "}")


def _take_key(cursor: Cursor) -> Waiting[str | None]:
    """Take the tag of the next parameter. Returns its key; None if there is none, the cursor stays then."""
    start = cursor.at
    key = None
    if (yield from cursor.accept_after_space("<parameter=")):
        key = yield from _take_name(cursor)
    if key is None:
        cursor.at = start
    return key


def _take_name(cursor: Cursor) -> Waiting[str | None]:
    name = yield from cursor.take_run(_NAME)
    return name if name and (yield from cursor.accept(">")) else None


def _as_json(value: str, types: frozenset[str]) -> str:
    """Return the value as JSON of one of these types, or else as a string."""
    bare = value.strip()
    for name in _WORDS.keys() & types:
        if word := _WORDS[name].get(bare.lower()):
            return word
    if types and "string" not in types and _is_json(bare, types):
        return bare
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str, types: frozenset[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return any(type(value) in _TYPES.get(name, ()) for name in types)


def _cut_off(value: str, types: frozenset[str]) -> str:
    if types and "string" not in types:
        return value.strip()
    return json.dumps(value.removeprefix("\n"), ensure_ascii=False)[:-1]
