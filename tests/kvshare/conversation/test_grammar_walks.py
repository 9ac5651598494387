"""Whatever a grammar allows, the parser reads: random walks through it."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from kvshare.conversation.chat import (
    CallArguments,
    CallBegins,
    Chat,
    Part,
    Reasoning,
    Text,
    ToolChoice,
    ToolUse,
)
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.tools import ToolFormat
from tests.kvshare.conversation.answers import read, tool
from tests.kvshare.conversation.vocabularies import (
    ADDED,
    HERMES,
    LLAMA3,
    MISTRAL,
    XML,
    Vocabulary,
    matcher,
    vocabulary,
)

HINTS = {
    HERMES: ["\n</tool_call>", '"}}', "</think>"],
    LLAMA3: ['"}}', "</think>"],
    MISTRAL: ['"}', "}]", "</think>"],
    XML: ["</parameter>\n", "</function>\n</tool_call>", "</think>"],
}
SHORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["C", "F"]},
        "hourly": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def walk(chat: Chat, fmt: ToolFormat, words: Vocabulary, chance: random.Random) -> str | None:
    """The text of allowed tokens drawn at random; None if it did not come to an end."""
    match = matcher(grammar_of(chat, fmt, added_tokens=words.added), words)
    ids: list[int] = []
    mask = allocate_token_bitmask(1, words.llguidance.vocab_size)
    while len(ids) < 400:
        if match.is_accepting() and chance.random() < 0.5:
            return words.decode(ids)
        if chance.random() < 0.3:  # or texts would hardly ever end
            hint = words.encode(chance.choice(HINTS[fmt]))
            ids += hint[: match.try_consume_tokens(hint)]
            continue
        fill_next_token_bitmask(match, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != words.llguidance.eos_token]
        if not allowed.size:
            return words.decode(ids)
        token = int(chance.choice(allowed))
        assert match.consume_token(token), match.get_error()
        ids.append(token)
    return None


@pytest.mark.parametrize("markers", ADDED, ids=ADDED.values())
@pytest.mark.parametrize("fmt", ToolFormat)
def test_whatever_is_allowed_is_read_as_calls(fmt: ToolFormat, markers: bool) -> None:
    """Answers drawn at random from a grammar are calls of its tools, with arguments by their schemas."""
    tools = (tool("weather", SHORT), tool("now"), tool("weather_map", SHORT))
    chat = Chat((), tools, ToolChoice(ToolUse.REQUIRED))
    chance, words = random.Random(7), vocabulary(markers)
    texts = [text for _ in range(25) if (text := walk(chat, fmt, words, chance)) is not None]
    assert len(texts) >= 8
    for text in texts:
        _check_calls(read(fmt, text, chat=chat), fmt, text)


def _check_calls(parts: Sequence[Part], fmt: ToolFormat, text: str) -> None:
    assert not [part for part in parts if isinstance(part, Text)], text
    spoken = [part for part in parts if not isinstance(part, Reasoning)]
    for begins, arguments in zip(spoken[::2], spoken[1::2], strict=True):
        assert isinstance(begins, CallBegins), text
        assert isinstance(arguments, CallArguments), text
        values = json.loads(arguments.text)
        if begins.name == "now":
            assert values == {}
            continue
        assert begins.name in ("weather", "weather_map")
        assert {"city", "days"} <= set(values) <= set(SHORT["properties"])
        assert isinstance(values["city"], str)
        assert type(values["days"]) is int
        assert 0 <= values["days"] <= 20
        assert values.get("unit", "C") in ("C", "F")
        assert isinstance(values.get("hourly", True), bool)


@pytest.mark.parametrize("fmt", ToolFormat)
def test_whatever_is_allowed_beside_strict_tools(fmt: ToolFormat) -> None:
    """Answers drawn at random: no text that looks like a call, no call without all its arguments."""
    chat = Chat((), (tool("weather", SHORT, strict=True),))
    chance, words = random.Random(3), vocabulary(True)
    texts = [text for _ in range(15) if (text := walk(chat, fmt, words, chance)) is not None]
    assert len(texts) >= 5
    for text in texts:
        parts = [part for part in read(fmt, text, chat=chat) if not isinstance(part, Text)]
        _check_calls(parts, fmt, text)
