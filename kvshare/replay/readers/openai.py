"""
Logs of OpenAI request bodies: bare, or under `body` (Batch API) or `request`, the answer under `response`.

Chat completions, completions (a prompt may be a text, token ids, or a list of either: one request each) and
responses (`input`, `instructions`). Time from `created`, `created_at` or `timestamp`, user from `user` or
`safety_identifier`, conversation from `conversation`, `conversation_id` or `session_id`, beside the body, in
it, or in its `metadata`. Tools are put before the messages as a system message: a model's own template would
write them there in its own words, which are not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields, prompts
from kvshare.replay.readers.rows import LoggedRow, Place, Reason, RowError
from kvshare.replay.requests import LoggedRequest, Message


def is_body(row: Mapping[str, Any]) -> bool:
    for name in ("body", "request"):
        if isinstance(row.get(name), Mapping):
            return True
    return "model" in row and any(name in row for name in ("messages", "prompt", "input"))


def read_body(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow | Reason]:
    body = fields.first(row, "body", "request")
    body = row if body is None else body
    if not isinstance(body, Mapping):
        raise RowError(Reason.WRONG_TYPE)
    metadata = body.get("metadata")
    known = {**(metadata if isinstance(metadata, Mapping) else {}), **body, **row}
    if body.get("messages") is None and body.get("prompt") is not None:
        several = _prompts(body["prompt"])
        for number, prompt in enumerate(several):
            own = place.name if len(several) == 1 else f"{place.name}.{number}"
            try:
                yield _row(known, place, own, **_prompt(prompt))
            except RowError as exc:
                yield exc.reason
        return
    messages = body.get("messages")
    messages = _messages_of_input(body) if messages is None else fields.messages(messages)
    yield _row(known, place, place.name, messages=prompts.asking((*_tools(body), *messages)))


def _row(
    known: Mapping[str, Any],
    place: Place,
    own_name: str,
    *,
    messages: tuple[Message, ...] | None = None,
    prompt: str | None = None,
    token_ids: tuple[int, ...] | None = None,
) -> LoggedRow:
    conversation = fields.optional_id(known, "conversation_id", "session_id")
    if conversation is None and isinstance(known.get("conversation"), str | int):
        conversation = fields.optional_id(known, "conversation")
    return LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=conversation or own_name,
            turn=prompts.num_earlier_turns(messages),
            user=fields.optional_id(known, "user", "safety_identifier", "user_id"),
            time_s=fields.time_s(fields.first(known, "timestamp", "created", "created_at")),
            messages=messages,
            prompt=prompt,
            token_ids=token_ids,
            answer=_answer(known.get("response")),
            language=fields.optional_text(known, "language") or "unknown",
            namespace=fields.optional_id(known, "namespace", "tenant") or "default",
        ),
        turn_by_order=conversation is not None and messages is None,
    )


def _prompts(value: object) -> list[Any]:
    return value if isinstance(value, list) and value and isinstance(value[0], list | str) else [value]


def _prompt(value: object) -> dict[str, Any]:
    if isinstance(value, list):
        return {"token_ids": prompts.tokens(value)}
    return {"prompt": prompts.full(fields.text(value))}


def _messages_of_input(body: Mapping[str, Any]) -> tuple[Message, ...]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = fields.optional_text(body, "instructions")
    leading = ({"role": "system", "content": instructions},) if instructions else ()
    return (*leading, *fields.messages(items))


def _tools(body: Mapping[str, Any]) -> tuple[Message, ...]:
    tools = fields.first(body, "tools", "functions")
    if not tools:
        return ()
    return ({"role": "system", "content": fields.text(json.dumps(tools, ensure_ascii=False, default=str))},)


def _answer(response: object) -> str | None:
    """What the first choice said; None where the log does not tell, or tells it in another way."""
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
