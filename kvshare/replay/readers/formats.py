"""The formats by name, and which of them the first rows of a file are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvshare.replay.readers import chats, lmsys, openai, plain, prompts, sharegpt, traces, wildchat
from kvshare.replay.readers.row import LoggedRow, Place
from kvshare.replay.readers.unreadable import Reason


@dataclass(frozen=True, slots=True)
class Format:
    """
    How the rows of one published format become requests.

    A `Reason` stands for one of a row's several requests that cannot be read, a RowError for all of the row.
    """

    name: str
    what: str
    matches: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[Mapping[str, Any], Place], Iterator[LoggedRow | Reason]]  # raises RowError
    has_content: bool = True  # False: lengths only, recognised in order to be refused


# In the order in which they are tried: the ones with the most telling fields first.
FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format(
            "mooncake",
            "Mooncake traces: timestamp, input_length, output_length, hash_ids",
            traces.matches_mooncake,
            traces.convert_mooncake,
        ),
        Format(
            "azure",
            "Azure LLM traces: lengths only, so that nothing can be shared",
            traces.matches_lengths,
            traces.convert_lengths,
            has_content=False,
        ),
        Format(
            "wildchat",
            "WildChat: conversation_hash, or conversation_id and timestamp; conversation",
            wildchat.matches,
            wildchat.convert,
        ),
        Format("lmsys", "LMSYS-Chat-1M: conversation_id, conversation", lmsys.matches, lmsys.convert),
        Format("sharegpt", "ShareGPT: conversations with from and value", sharegpt.matches, sharegpt.convert),
        Format("openai", "OpenAI request bodies, bare or as Batch API lines", openai.matches, openai.convert),
        Format("prompts", "vLLM, guidellm, AIBrix: prompt with lengths", prompts.matches, prompts.convert),
        Format("conversations", "whole conversations as messages", chats.matches, chats.convert),
        Format("plain", "one request per row: messages or prompt", plain.matches, plain.convert),
    )
}


def offered() -> str:
    """The names to choose from, for messages."""
    return ", ".join(each.name for each in FORMATS.values() if each.has_content)


def named(name: str) -> Format | None:
    """The format of this name, if there is one. "plain:FIELD" finds the prompts in that field."""
    base, _, field = name.partition(":")
    if base != "plain" or not field:
        return FORMATS.get(name)

    def convert(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow | Reason]:
        return plain.convert({**row, "prompt": row.get(field), "messages": None, "token_ids": None}, place)

    return replace(FORMATS[base], convert=convert)


def detect(rows: Sequence[Mapping[str, Any]]) -> Format | None:
    """The first format that fits any of these rows: `conversations` end with a question here and there."""
    return next((each for each in FORMATS.values() if any(each.matches(row) for row in rows)), None)
