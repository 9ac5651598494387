"""
Rows that are requests: plain prompts and messages, prompts of load tools, traces without text, and OpenAI
request bodies.

Requests have a conversation, a user and a time under any of the names in `names`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvshare.errors import LogError
from kvshare.logs import fields, names
from kvshare.logs.files import Row
from kvshare.logs.requests import LoggedRequest, Message
from kvshare.logs.rows import LoggedRow, RowError, RowFault
from kvshare.namespace import joined

_MOONCAKE_BLOCK_SIZE = 512
_MOST_LEVELS = 4  # of objects in an answer, down to its text


def is_plain(row: Row) -> bool:
    return not row.keys().isdisjoint(("messages", "prompt", "token_ids"))


def read_plain(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """
    `messages`, `prompt` or `token_ids`, and more fields if a log has them; `kvshare workload` writes such
    rows.

    Optional: `conversation` (the same string in all rows of one, in any file), `turn`, `user`, `timestamp`,
    `answer`, `language`, `namespace`, `cache_salt`. Without a `turn`, it is the number of earlier user
    messages, for bare prompts their place in the conversation.
    """
    content: dict[str, Any]
    if row.get("messages") is not None:
        content = {"messages": _asking(fields.messages(row["messages"]))}
    elif row.get("token_ids") is not None:
        content = {"token_ids": _tokens(row["token_ids"])}
    else:
        content = {"prompt": _full_text(row.get("prompt"))}
    turn = fields.optional(fields.int32, row, "turn")
    found = fields.parsed(fields.first(row, "answer", "completion", "response"))
    answer = _answer(found) if isinstance(found, Mapping) else fields.optional(fields.text, {"": found}, "")
    yield _request_row(row, blank, turn=turn, times=(*names.TIME, "time"), answer=answer, **content)


def read_field(row: Row, blank: LoggedRequest, field: str) -> Iterator[LoggedRow]:
    """Return a plain row with its prompt in `field`."""
    return read_plain({**row, "prompt": row.get(field), "messages": None, "token_ids": None}, blank)


def _request_row(
    row: Row,
    blank: LoggedRequest,
    *,
    turn: int | None = None,
    times: Sequence[str] = names.TIME,
    **content: Any,
) -> LoggedRow:
    """
    Return a request with its `content` and what else the row has.

    `times`: fields for the time. `time` is one in plain rows only: elsewhere it may be a duration.
    """
    conversation = fields.optional_id(row, *names.CONVERSATION)
    messages = content.get("messages")
    num_questions = sum(message["role"] == "user" for message in messages or ())
    request = replace(
        blank,
        conversation=conversation or blank.conversation,
        turn=max(0, num_questions - 1) if turn is None else turn,
        user=fields.optional_id(row, *names.USER),
        time_s=fields.time_s(fields.first(row, *times)),
        language=fields.language(row),
        namespace=_namespace(row),
        **content,
    )
    by_order = conversation is not None and messages is None and turn is None
    return LoggedRow(request, turn_by_order=by_order)


def _namespace(row: Row) -> str:
    """Return the namespace that the log names, divided by the request's `cache_salt` as a server would."""
    named = fields.optional_id(row, *names.NAMESPACE) or "default"
    salt = fields.optional_id(row, "cache_salt")
    return joined((named,) if salt is None else (named, salt))


def _request_rows(
    items: Sequence[object], blank: LoggedRequest, read: Callable[[Any, LoggedRequest], LoggedRow]
) -> Iterator[LoggedRow | RowFault]:
    """Yield a request for each item of a row; an item that cannot be read costs no other."""
    for number, item in enumerate(items):
        own = blank if len(items) == 1 else replace(blank, conversation=f"{blank.conversation}.{number}")
        try:
            yield read(item, own)
        except RowError as exc:
            yield exc.reason


def is_prompt(row: Row) -> bool:
    has_length = not row.keys().isdisjoint(names.LENGTHS)
    return isinstance(row.get("requests"), list) or ("prompt" in row and has_length)


def read_prompts(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow | RowFault]:
    """
    Prompts with lengths, as load tools take them. The lengths are another tokenizer's and are ignored.

        vLLM     {"prompt": ..., "output_tokens": ...}
        guidellm {"prompt": ..., "prompt_tokens_count": ..., "output_tokens_count": ...}
        AIBrix   {"timestamp": ms, "requests": [{"prompt", "prompt_length", "output_length", "session_id"}]},
                 and flat rows with "timestamp_ms", "prompt_tokens", "output_tokens"
    """
    requests = row.get("requests")
    if requests is None:
        time_s = _milliseconds(row, "timestamp_ms")
        yield _prompt_row(row if time_s is None else {**row, "timestamp": time_s}, blank)
        return
    if not fields.of_type(list, requests):
        raise RowError(RowFault.EMPTY)
    time_s = _milliseconds(row, "timestamp")  # AIBrix's own files count from 0
    yield from _request_rows(requests, blank, lambda one, own: _prompt_row(one, own, timestamp=time_s))


def _prompt_row(item: object, blank: LoggedRequest, **known: float | None) -> LoggedRow:
    row = fields.of_type(dict, item)
    prompt = _full_text(row.get("prompt"))
    answer = fields.optional(fields.text, row, "completion", "answer")
    return _request_row({**row, **known}, blank, prompt=prompt, answer=answer)


def read_mooncake(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """
    Yield one hash id per block of 512 tokens, of the block *and* all tokens before it; equal ids are equal
    tokens.

    Users and conversations are not named, and a known first block may be any system prompt, so that user and
    turn are unknown.
    """
    hashes = tuple(map(fields.count, fields.of_type(list, row.get("hash_ids"))))
    num_tokens = fields.count(row.get("input_length"))
    if not num_tokens:
        raise RowError(RowFault.EMPTY)
    if len(hashes) != -(-num_tokens // _MOONCAKE_BLOCK_SIZE):
        raise RowError(RowFault.WRONG_TYPE)  # the blocks and the length contradict each other
    blocks = replace(blank, block_hashes=hashes, block_size=_MOONCAKE_BLOCK_SIZE, num_tokens=num_tokens)
    yield LoggedRow(replace(blocks, time_s=_milliseconds(row, "timestamp")))


def refuse_azure(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """Raises LogError: the rows have lengths only, in which nothing can be found again."""
    raise LogError(f"{blank.source} has only the lengths of requests; a replay needs their text or token ids")


def is_body(row: Row) -> bool:
    if any(isinstance(row.get(name), Mapping) for name in names.BODIES):
        return True
    sent = row.get("input")
    if isinstance(sent, Mapping):
        return "messages" in sent
    if isinstance(sent, list) and sent and isinstance(sent[0], Mapping) and "role" in sent[0]:
        return True
    return "model" in row and any(name in row for name in ("messages", "prompt", "input"))


def body_of(row: Row) -> Row:
    """Return the body of the request that a row logs; the row itself where that is the body."""
    body_text = next((row[name] for name in names.BODIES if row.get(name) not in (None, "", {})), None)
    if body_text is None:
        given = row.get("input")
        return given if isinstance(given, Mapping) else row
    body = fields.unpacked(fields.of_type(dict, body_text))
    inner = body.get("body")  # LiteLLM's callbacks log the request with its URL and headers
    return fields.unpacked(inner) if isinstance(inner, Mapping) else body


def read_body(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow | RowFault]:
    """
    OpenAI request bodies: bare, or next to what a log says of them, the answer under `response`.

        Batch API  {"custom_id": ..., "body": {...}}; other logs have `request`
        LiteLLM    its spend log: `messages` or `proxy_server_request`, `response`, `startTime`, `end_user`
        Langfuse   `input` (messages, or an object that has them) and `output`
        Helicone   `request_body` and `response_body`

    Chat completions, completions (a prompt may be a text, token ids, or a list of either: one request each)
    and responses (`input`, `instructions`). Conversation, user and time are next to the body, in it, or in
    its `metadata`. Tools become a system message before the others: the template of the log's model would
    write them there, in words that are not known here.
    """
    body = body_of(row)
    members = _known(row, body)
    answer = _answer(fields.first(members, *names.ANSWERS))
    messages, prompt = _asked(body)
    if messages is None and prompt is not None:
        is_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str)

        def read(one: Any, request: LoggedRequest) -> LoggedRow:
            if isinstance(one, list):
                return _request_row(members, request, answer=answer, token_ids=_tokens(one))
            return _request_row(members, request, answer=answer, prompt=_full_text(one))

        yield from _request_rows(prompt if is_several else [prompt], blank, read)
        return
    messages = _messages_of_input(body) if messages is None else fields.messages(messages)
    if tools := fields.first(body, "tools", "functions"):
        text = fields.text(json.dumps(tools, ensure_ascii=False, default=str))
        messages = ({"role": "system", "content": text}, *messages)
    yield _request_row(members, blank, messages=_asking(messages), answer=answer)


def _known(row: Row, body: Row) -> dict[str, Any]:
    """Return all fields of a request: those next to its body, in it, and in its metadata."""
    metadata = body.get("metadata")
    members = {**(metadata if isinstance(metadata, Mapping) else {}), **body, **row}
    own, *others = names.CONVERSATION
    named = next((members[name] for name in others if members.get(name)), members.get(own))
    return {**members, own: named if isinstance(named, str | int) else None}  # the API's is an object


def _asked(body: Row) -> tuple[Any, Any]:
    """Messages and prompt, not yet checked. LiteLLM has {} for no messages, a bare prompt in their place."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, str):
        return None, messages
    if messages != {}:
        return messages, prompt
    if prompt is None and not body.get("input"):
        raise RowError(RowFault.EMPTY)
    return None, prompt


def _messages_of_input(body: Row) -> tuple[Message, ...]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = fields.optional(fields.text, body, "instructions")
    leading = ({"role": "system", "content": instructions},) if instructions else ()
    return (*leading, *fields.messages(items))


def _answer(response: object) -> str | None:
    """Return the text of the first choice, message or output; None if there is none that can be read."""
    answer: Any = fields.parsed(response)
    if isinstance(answer, Mapping) and isinstance(answer.get("body"), Mapping):
        answer = answer["body"]
    said = _said(answer)
    if said is None and isinstance(response, str):  # the text itself, which may be JSON
        return fields.text(response)
    return said


def _said(answer: Any, levels: int = _MOST_LEVELS) -> str | None:
    """Return the text in an answer of any of the four APIs, or in one message."""
    if isinstance(answer, list):
        texts = [_said(part, levels) for part in answer if isinstance(part, Mapping)]
        return "".join(text for text in texts if text) or None
    if not isinstance(answer, Mapping) or not levels:
        return None
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        message = choices[0].get("message")
        content = message.get("content") if isinstance(message, Mapping) else choices[0].get("text")
    else:
        content = fields.first(answer, "content", "output", "text")
    return fields.text(content) if isinstance(content, str) else _said(content, levels - 1)


def _asking(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the same messages. Raises RowError if none of them asks for an answer."""
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise RowError(RowFault.NO_USER_TURN)
    return messages


def _full_text(value: object) -> str:
    text = fields.text(value)
    if not text.strip():
        raise RowError(RowFault.EMPTY)
    return text


def _tokens(value: object) -> tuple[int, ...]:
    if not (ids := fields.of_type(list, value)):
        raise RowError(RowFault.EMPTY)
    return tuple(map(fields.int32, ids))


def _milliseconds(row: Row, name: str) -> float | None:
    value = fields.optional(fields.seconds, row, name)
    return None if value is None else value / 1e3
