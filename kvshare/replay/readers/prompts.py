"""Rows that are requests: plain prompts and messages, prompts of load tools, traces without text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvshare.errors import LogError
from kvshare.replay.readers import fields
from kvshare.replay.readers.files import Row
from kvshare.replay.readers.rows import LoggedRow, Reason, RowError
from kvshare.replay.requests import LoggedRequest, Message

_MOONCAKE_BLOCK_SIZE = 512
_TIMES = ("timestamp", "created", "created_at")
_ANSWER_LENGTHS = ("output_tokens_count", "output_tokens", "output_length", "completion_tokens")
_PROMPT_LENGTHS = ("prompt_tokens_count", "prompt_tokens", "prompt_length", "prompt_len")


def read_plain(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """
    `messages`, `prompt` or `token_ids`, and more fields if a log has them; `kvshare workload` writes such
    rows.

    Optional: `conversation` (the same string in all rows of one, in any file), `turn`, `user`, `timestamp`,
    `answer`, `language`, `namespace`. Without a `turn`, it is the number of earlier user messages, for bare
    prompts their place in the conversation.
    """
    content: dict[str, Any]
    if row.get("messages") is not None:
        content = {"messages": asking(fields.messages(row["messages"]))}
    elif row.get("token_ids") is not None:
        content = {"token_ids": tokens(row["token_ids"])}
    else:
        content = {"prompt": full_text(row.get("prompt"))}
    turn = fields.optional(fields.int32, row, "turn")
    answer = fields.optional(fields.text, row, "answer", "completion", "response")
    yield request_row(row, blank, turn=turn, times=(*_TIMES, "time"), answer=answer, **content)


def read_field(row: Row, blank: LoggedRequest, field: str) -> Iterator[LoggedRow]:
    """A plain row with its prompt in `field`."""
    return read_plain({**row, "prompt": row.get(field), "messages": None, "token_ids": None}, blank)


def request_row(
    row: Row,
    blank: LoggedRequest,
    *,
    turn: int | None = None,
    times: Sequence[str] = _TIMES,
    **content: Any,
) -> LoggedRow:
    """
    A request with its `content` and what else the row has, under any of the names that logs use.

    `times`: fields for the time. `time` is one in plain rows only: elsewhere it may be a duration.
    """
    conversation = fields.optional_id(row, "conversation", "conversation_id", "session_id")
    messages = content.get("messages")
    request = replace(
        blank,
        conversation=conversation or blank.conversation,
        turn=_num_earlier_turns(messages or ()) if turn is None else turn,
        user=fields.optional_id(row, "user", "safety_identifier", "user_id"),
        time_s=fields.time_s(fields.first(row, *times)),
        language=fields.language(row),
        namespace=fields.optional_id(row, "namespace", "tenant") or "default",
        **content,
    )
    by_order = conversation is not None and messages is None and turn is None
    return LoggedRow(request, turn_by_order=by_order)


def request_rows(
    items: Sequence[object], blank: LoggedRequest, read: Callable[[Any, LoggedRequest], LoggedRow]
) -> Iterator[LoggedRow | Reason]:
    """A request for each item of a row; an item that cannot be read costs no other."""
    for number, item in enumerate(items):
        own = blank if len(items) == 1 else replace(blank, conversation=f"{blank.conversation}.{number}")
        try:
            yield read(item, own)
        except RowError as exc:
            yield exc.reason


def is_prompt(row: Row) -> bool:
    if isinstance(row.get("requests"), list):
        return True
    return "prompt" in row and any(name in row for name in (*_ANSWER_LENGTHS, *_PROMPT_LENGTHS))


def read_prompts(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow | Reason]:
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
    if not isinstance(requests, list):
        raise RowError(Reason.WRONG_TYPE)
    if not requests:
        raise RowError(Reason.EMPTY)
    time_s = _milliseconds(row, "timestamp")  # AIBrix's own files count from 0
    yield from request_rows(requests, blank, lambda one, own: _prompt_row(one, own, timestamp=time_s))


def _prompt_row(row: object, blank: LoggedRequest, **known: float | None) -> LoggedRow:
    if not isinstance(row, Mapping):
        raise RowError(Reason.WRONG_TYPE)
    return request_row(
        {**row, **known},
        blank,
        prompt=full_text(row.get("prompt")),
        answer=fields.optional(fields.text, row, "completion", "answer"),
    )


def read_mooncake(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """
    One hash id per block of 512 tokens, of the block *and* all tokens before it; equal ids are equal tokens.

    Users and conversations are not named, and a known first block may be any system prompt, so that user and
    turn are unknown.
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
        raise RowError(Reason.WRONG_TYPE)  # the blocks and the length contradict each other
    yield LoggedRow(
        replace(
            blank,
            time_s=_milliseconds(row, "timestamp"),
            block_hashes=hashes,
            block_size=_MOONCAKE_BLOCK_SIZE,
            num_tokens=num_tokens,
        )
    )


def refuse_azure(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """Raises LogError: the rows have lengths only, in which nothing can be found again."""
    raise LogError(f"{blank.source} has only the lengths of requests; a replay needs their text or token ids")


def asking(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The same messages. Raises RowError if none of them asks for an answer."""
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise RowError(Reason.NO_USER_TURN)
    return messages


def full_text(value: object) -> str:
    """A text that is not blank."""
    text = fields.text(value)
    if not text.strip():
        raise RowError(Reason.EMPTY)
    return text


def tokens(value: object) -> tuple[int, ...]:
    """Token ids that fit 32 bits."""
    if not isinstance(value, list):
        raise RowError(Reason.WRONG_TYPE)
    if not value:
        raise RowError(Reason.EMPTY)
    return tuple(map(fields.int32, value))


def _num_earlier_turns(messages: Sequence[Message]) -> int:
    """User messages before the last one."""
    return max(0, sum(message["role"] == "user" for message in messages) - 1)


def _milliseconds(row: Row, name: str) -> float | None:
    """In seconds."""
    value = fields.optional(fields.seconds, row, name)
    return None if value is None else value / 1e3
