"""What a client reads of an answer whose format it gave, on every route, and whether that is right."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import jsonschema


def message_of(text: str) -> str:
    return str((json.loads(text).get("error") or {}).get("message") or "")


def finished_answer(place: str, document: Mapping[str, Any]) -> str | None:
    """The text that follows the schema; None if the answer was cut."""
    if place in ("chat", "completion", "guided", "chat tool", "lenient tool"):
        (choice,) = document["choices"]
        if choice["finish_reason"] == "length":
            return None
        if "text" in choice:
            return str(choice["text"])
        calls = choice["message"].get("tool_calls")
        return str(calls[0]["function"]["arguments"] if calls else choice["message"]["content"])
    if place in ("text", "responses tool"):
        if document["status"] != "completed":
            return None
        item = document["output"][0]
        return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    if document["stop_reason"] == "max_tokens":
        return None
    block = document["content"][0]
    return json.dumps(block["input"]) if block["type"] == "tool_use" else str(block["text"])


def mismatch(answer: str, schema: dict[str, Any], *, lenient: bool) -> str:
    """Why a finished answer is wrong; empty if it is right, or jsonschema cannot tell."""
    try:
        value = json.loads(answer)
    except ValueError:
        return "is no JSON"
    if lenient or not is_readable(schema):
        return ""
    try:
        errors = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    except Exception:  # noqa: BLE001  a reference to nowhere, a circle, a pattern of another dialect
        return ""
    told = [error for error in errors if not is_of_floats(error)]
    return f"does not follow it: {told[0].message[:300]}" if told else ""


def is_readable(schema: dict[str, Any]) -> bool:
    """Whether jsonschema knows what it means, and needs no long time for it."""
    if max(map(len, patterns_of(schema)), default=0) > 30:
        return False
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except Exception:  # noqa: BLE001  whatever is wrong with it
        return False
    return True


def patterns_of(schema: object) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
        return own + [each for value in schema.values() for each in patterns_of(value)]
    if isinstance(schema, list):
        return [each for value in schema for each in patterns_of(value)]
    return []


def is_of_floats(error: jsonschema.ValidationError) -> bool:
    """jsonschema divides floats: 0.07 is no multiple of 0.01 for it."""
    if error.validator != "multipleOf":
        return False
    return Decimal(str(error.instance)) % Decimal(str(error.validator_value)) == 0
