"""Log-probabilities belong to the text that is shown: parts of characters, stop strings, text held back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvshare.engine import TokenLogprob
from proxy.generate.chat.completion_writer import token_name, top_of
from tests.proxy.embedded_server import EmbeddedServer, running_embedded

TEXT = "ab \N{WOMAN}\N{SLIGHTLY SMILING FACE} xyz"
FORCED = {"model": "kvshare-demo", "guided_json": {"const": TEXT}, "max_tokens": 60, "temperature": 0}
CHAT = "/v1/chat/completions"


def frames(text: str) -> Iterator[dict[str, Any]]:
    """The choices of a stream."""
    for line in text.split("\n\n"):
        if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
            yield choices[0]


async def completed(server: EmbeddedServer, **extra: object) -> tuple[str, dict[str, list[Any]]]:
    """
    The text of a completion and its log-probabilities. A stream of it has the same, and no chunk has tokens
    of text that comes later.
    """
    body = {**FORCED, "prompt": "Say it.", "logprobs": 5, **extra}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
        (choice,) = (await response.json())["choices"]
    joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    text = ""
    async with server.http.post(f"{server.url}/v1/completions", json=body | {"stream": True}) as response:
        for chunk in frames(await response.text()):
            text += chunk["text"]
            for name, values in (chunk["logprobs"] or {}).items():
                joined[name] += values
            assert all(offset <= len(text) for offset in joined["text_offset"])
    assert (text, joined["tokens"]) == (choice["text"], choice["logprobs"]["tokens"])
    assert joined["text_offset"] == choice["logprobs"]["text_offset"]
    return text, choice["logprobs"]


def raw_of(name: str) -> bytes:
    """The bytes of a token by its name."""
    part = name.removeprefix("bytes:")
    return name.encode() if part == name else part.encode().decode("unicode_escape").encode("latin-1")


async def test_parts_of_characters_and_stop_strings_on_both_routes() -> None:
    """
    Each token has its own name, `bytes:...` where it is a part of a character; its place in the text; and as
    many alternatives as were asked for. Tokens of a stop string are left out.
    """
    async with running_embedded() as server:
        text, logprobs = await completed(server)
        assert text == json.dumps(TEXT, ensure_ascii=False)
        raw = [raw_of(name) for name in logprobs["tokens"]]
        assert b"".join(raw).decode() == text
        assert sum(name.startswith("bytes:") for name in logprobs["tokens"]) >= 4
        assert not any("\N{REPLACEMENT CHARACTER}" in name for name in logprobs["tokens"])
        for number, offset in enumerate(logprobs["text_offset"]):
            before = b"".join(raw[:number]).decode(errors="ignore")
            assert offset == len(before)
        assert all(len(top) in (5, 6) for top in logprobs["top_logprobs"])
        for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert name in top

        for stop, shown in (("\N{SLIGHTLY SMILING FACE}", '"ab \N{WOMAN}'), (" xy", text[:6]), ("b", '"a')):
            cut, logprobs = await completed(server, stop=[stop])
            assert cut == shown
            raw = [raw_of(name) for name in logprobs["tokens"]]
            assert all(offset < len(cut) for offset in logprobs["text_offset"])
            assert b"".join(raw).decode(errors="ignore").startswith(cut)
            messages = [{"role": "user", "content": "Say it."}]
            chat = FORCED | {"prompt": None, "messages": messages, "logprobs": True, "stop": [stop]}
            async with server.http.post(server.url + CHAT, json=chat) as response:
                (choice,) = (await response.json())["choices"]
            assert choice["message"]["content"] == cut
            assert [bytes(token["bytes"]) for token in choice["logprobs"]["content"]] == raw

        for num_tokens in range(4, 9):
            cut, logprobs = await completed(server, max_tokens=num_tokens)
            assert len(logprobs["tokens"]) == num_tokens
            assert b"".join(map(raw_of, logprobs["tokens"])).decode(errors="ignore") == cut


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b"\xf0\x9f", r"bytes:\xf0\x9f"),
        (b" \xf0", r"bytes: \xf0"),
        (b"\\\xff", r"bytes:\x5c\xff"),
        (b"a\n", "a\n"),
        ("\N{WOMAN}".encode(), "\N{WOMAN}"),
    ],
)
def test_a_token_is_named_by_its_text_or_its_bytes(raw: bytes, name: str) -> None:
    """As OpenAI names it."""
    assert token_name(TokenLogprob(1, raw.decode(errors="replace"), raw, -1.0)) == name


def test_tokens_of_equal_text_do_not_fall_together() -> None:
    """The sampled one has the name that `tokens` has."""
    one, other = (TokenLogprob(number, "a", b"a", -float(number)) for number in (1, 2))
    sampled = TokenLogprob(2, "a", b"a", -2.0, top=(one, other))
    assert top_of(sampled) == {"token_id:1": -1.0, "a": -2.0}
