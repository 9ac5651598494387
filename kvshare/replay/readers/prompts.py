"""Rows that are requests: plain prompts and messages, load tools' prompts, and traces without text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields
from kvshare.replay.readers.rows import LoggedRow, Place, Reason, RowError
from kvshare.replay.requests import LoggedRequest, Message

_MAX_INT32 = (1 << 31) - 1
_MOONCAKE_BLOCK_SIZE = 512
_ANSWER_LENGTHS = ("output_tokens_count", "output_tokens", "output_length", "completion_tokens")
_PROMPT_LENGTHS = ("prompt_tokens_count", "prompt_tokens", "prompt_length", "prompt_len")


def is_plain(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in ("messages", "prompt", "token_ids"))


def read_plain(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    """
    `messages` or `prompt` (or `token_ids`), and whatever else a log knows: what `kvshare workload` writes.

    Optional: `conversation` (the same string in all rows of one, in any file), `turn`, `user`, `timestamp`,
    `answer`, `language`, `namespace`. Without a `turn`, it is the number of earlier user messages; that of
    bare prompts is their place in the conversation.
    """
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    if row.get("messages") is not None:
        messages = asking(fields.messages(row["messages"]))
    elif row.get("token_ids") is not None:
        token_ids = tokens(row["token_ids"])
    else:
        prompt = full(fields.text(row.get("prompt")))
    conversation = fields.optional_id(row, "conversation", "conversation_id", "session_id")
    turn = fields.optional_count(row, "turn")
    if turn is not None and turn > _MAX_INT32:
        raise RowError(Reason.WRONG_TYPE)
    yield LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=conversation or place.name,
            turn=num_earlier_turns(messages) if turn is None else turn,
            user=fields.optional_id(row, "user", "user_id"),
            time_s=fields.time_s(fields.first(row, "timestamp", "created", "created_at", "time")),
            messages=messages,
            prompt=prompt,
            token_ids=token_ids,
            answer=fields.optional_text(row, "answer", "completion", "response"),
            language=fields.optional_text(row, "language", "lang") or "unknown",
            namespace=fields.optional_id(row, "namespace", "tenant") or "default",
        ),
        turn_by_order=conversation is not None and messages is None and turn is None,
    )


def read_field(row: Mapping[str, Any], place: Place, field: str) -> Iterator[LoggedRow]:
    """A plain row whose prompt stands in `field`."""
    return read_plain({**row, "prompt": row.get(field), "messages": None, "token_ids": None}, place)


def is_prompt(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("requests"), list):
        return True
    return "prompt" in row and any(name in row for name in (*_ANSWER_LENGTHS, *_PROMPT_LENGTHS))


def read_prompts(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow | Reason]:
    """
    Prompts with lengths, as load tools take them.

        vLLM     {"prompt": ..., "output_tokens": ...}
        guidellm {"prompt": ..., "prompt_tokens_count": ..., "output_tokens_count": ...}
        AIBrix   {"timestamp": ms, "requests": [{"prompt", "prompt_length", "output_length", "session_id"}]},
                 and flat rows with "timestamp_ms", "prompt_tokens", "output_tokens"

    The logged lengths were counted by somebody else's tokenizer: only that of the answer is kept.
    """
    requests = row.get("requests")
    if requests is None:
        time_s = _milliseconds(row, "timestamp_ms")
        time_s = fields.time_s(row.get("timestamp")) if time_s is None else time_s
        yield _prompt_row(row, place, place.name, time_s)
        return
    if not isinstance(requests, list):
        raise RowError(Reason.WRONG_TYPE)
    if not requests:
        raise RowError(Reason.EMPTY)
    time_s = _milliseconds(row, "timestamp")  # AIBrix's own files count from 0
    for number, request in enumerate(requests):
        try:
            yield _prompt_row(request, place, f"{place.name}.{number}", time_s)
        except RowError as exc:
            yield exc.reason


def _prompt_row(row: object, place: Place, own_name: str, time_s: float | None) -> LoggedRow:
    if not isinstance(row, Mapping):
        raise RowError(Reason.WRONG_TYPE)
    conversation = fields.optional_id(row, "session_id", "conversation")
    return LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=conversation or own_name,
            turn=0,
            user=fields.optional_id(row, "user"),
            time_s=time_s,
            prompt=full(fields.text(row.get("prompt"))),
            answer=fields.optional_text(row, "completion", "answer"),
            num_answer_tokens=fields.optional_count(row, *_ANSWER_LENGTHS),
            language=fields.optional_text(row, "language", "lang") or "unknown",
        ),
        turn_by_order=conversation is not None,
    )


def is_mooncake(row: Mapping[str, Any]) -> bool:
    return "hash_ids" in row and "input_length" in row


def read_mooncake(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    """
    One hash id per block of 512 tokens, each standing for the block *and* what comes before it.

    Equal ids are equal tokens. Neither users nor conversations are named, and a known first block may be any
    system prompt: who asked, and at which turn, is unknown.
    """
    hash_ids = row.get("hash_ids")
    if hash_ids is None:
        raise RowError(Reason.MISSING_FIELD)
    if not isinstance(hash_ids, list):
        raise RowError(Reason.WRONG_TYPE)
    hashes = tuple(fields.count(hash_id) for hash_id in hash_ids)
    num_tokens = fields.count(row.get("input_length"))
    if not num_tokens:
        raise RowError(Reason.EMPTY)
    if len(hashes) != -(-num_tokens // _MOONCAKE_BLOCK_SIZE):
        raise RowError(Reason.WRONG_TYPE)  # the blocks and the length tell different stories
    yield LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=place.name,
            time_s=_milliseconds(row, "timestamp"),
            block_hashes=hashes,
            block_size=_MOONCAKE_BLOCK_SIZE,
            num_tokens=num_tokens,
            num_answer_tokens=fields.optional_count(row, "output_length"),
        )
    )


def is_azure(row: Mapping[str, Any]) -> bool:
    return "ContextTokens" in row and "GeneratedTokens" in row


def read_azure(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    """Lengths only: a load shape, in which nothing can be a hit."""
    yield LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=place.name,
            time_s=fields.time_s(row.get("TIMESTAMP")),
            num_tokens=fields.count(row.get("ContextTokens")),
            num_answer_tokens=fields.count(row.get("GeneratedTokens")),
        )
    )


def asking(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The same, if somebody asks in them."""
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise RowError(Reason.NO_USER_TURN)
    return messages


def full(text: str) -> str:
    """The same, if there is any text."""
    if not text.strip():
        raise RowError(Reason.EMPTY)
    return text


def tokens(value: object) -> tuple[int, ...]:
    """Token ids that fit 32 bits."""
    if not isinstance(value, list):
        raise RowError(Reason.WRONG_TYPE)
    ids = tuple(fields.count(token_id) for token_id in value)
    if not ids:
        raise RowError(Reason.EMPTY)
    if max(ids) > _MAX_INT32:
        raise RowError(Reason.WRONG_TYPE)
    return ids


def num_earlier_turns(messages: tuple[Message, ...] | None) -> int:
    """User messages before the last one."""
    return max(0, sum(message["role"] == "user" for message in messages or ()) - 1)


def _milliseconds(row: Mapping[str, Any], name: str) -> float | None:
    """In seconds."""
    value = row.get(name)
    return None if value is None else fields.seconds(value) / 1e3
