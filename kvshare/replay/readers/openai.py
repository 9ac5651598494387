"""
Logs of OpenAI request bodies: bare, or under `body` (Batch API) or `request`, the answer under `response`.

Chat completions, completions (a prompt may be a text, token ids, or a list of either: one request each) and
responses (`input`, `instructions`). The time is `created`, `created_at` or `timestamp`, the user `user` or
`safety_identifier`, the conversation `conversation`, `conversation_id` or `session_id`: beside the body, in
it, or in its `metadata`. Tools become a system message before the others: the template of the log's model
would write them there, in words that are not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields, prompts
from kvshare.replay.readers.files import Row
from kvshare.replay.readers.rows import LoggedRow, Reason, RowError
from kvshare.replay.requests import LoggedRequest, Message


def is_body(row: Row) -> bool:
    for name in ("body", "request"):
        if isinstance(row.get(name), Mapping):
            return True
    return "model" in row and any(name in row for name in ("messages", "prompt", "input"))


def read_body(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow | Reason]:
    body = fields.first(row, "body", "request")
    body = row if body is None else body
    if not isinstance(body, Mapping):
        raise RowError(Reason.WRONG_TYPE)
    known = _known(row, body)
    answer = _answer(known.get("response"))
    messages = body.get("messages")
    if messages is None and body.get("prompt") is not None:
        yield from prompts.request_rows(
            _prompts(body["prompt"]),
            blank,
            lambda prompt, own: prompts.request_row(known, own, answer=answer, **_prompt(prompt)),
        )
        return
    messages = _messages_of_input(body) if messages is None else fields.messages(messages)
    asked = prompts.asking((*_tools(body), *messages))
    yield prompts.request_row(known, blank, messages=asked, answer=answer)


def _known(row: Row, body: Row) -> Row:
    """The fields beside the body, in it, and in its metadata."""
    metadata = body.get("metadata")
    known = {**(metadata if isinstance(metadata, Mapping) else {}), **body, **row}
    named = known.get("conversation_id") or known.get("session_id") or known.get("conversation")
    # The API's is an object.
    return {**known, "conversation": named if isinstance(named, str | int) else None}


def _prompts(value: object) -> list[Any]:
    return value if isinstance(value, list) and value and isinstance(value[0], list | str) else [value]


def _prompt(value: object) -> dict[str, Any]:
    if isinstance(value, list):
        return {"token_ids": prompts.tokens(value)}
    return {"prompt": prompts.full_text(value)}


def _messages_of_input(body: Row) -> tuple[Message, ...]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = fields.optional(fields.text, body, "instructions")
    leading = ({"role": "system", "content": instructions},) if instructions else ()
    return (*leading, *fields.messages(items))


def _tools(body: Row) -> tuple[Message, ...]:
    tools = fields.first(body, "tools", "functions")
    if not tools:
        return ()
    return ({"role": "system", "content": fields.text(json.dumps(tools, ensure_ascii=False, default=str))},)


def _answer(response: object) -> str | None:
    """The text of the first choice; None if the log has none, or in another shape."""
    if isinstance(response, str):
        return fields.text(response)
    found: Any = response
    if isinstance(found, Mapping) and isinstance(found.get("body"), Mapping):
        found = found["body"]
    choices = found.get("choices") if isinstance(found, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        return None
    message = choices[0].get("message")
    content = message.get("content") if isinstance(message, Mapping) else choices[0].get("text")
    return fields.text(content) if isinstance(content, str) else None
