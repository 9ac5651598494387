"""Requests in tokens: as the server would tokenize them, and made-up tokens for block hashes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvshare.conversation.chat import Chat
from kvshare.demo import MODEL_PATH
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.errors import LogError, ModelError
from kvshare.logs.requests import LoggedRequest
from kvshare.replay.tokens import RequestTokenizer, embedder_text, plain_layout
from vector_index.prompt_text import WINDOW_CHARS

BARE = LoggedRequest(source="log", line=1, conversation="c", turn=0, user="u")
MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How tall is the tower?"},
    {"role": "assistant", "content": "42 metres."},
    {"role": "user", "content": "And how old?"},
)


@pytest.fixture(scope="module")
def tokenizer() -> RequestTokenizer:
    return RequestTokenizer.load("demo")


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL_PATH)


def _blocks(hashes: tuple[int, ...], num_tokens: int) -> LoggedRequest:
    return replace(BARE, block_hashes=hashes, block_size=512, num_tokens=num_tokens)


def test_chats_and_prompts_are_tokenized_as_the_server_does(
    tokenizer: RequestTokenizer, encoder: PromptEncoder
) -> None:
    """In order, whatever the batch holds; answers beside them."""
    requests = [
        replace(BARE, messages=MESSAGES, answer="152 years."),
        replace(BARE, prompt="Once upon"),
        replace(BARE, token_ids=(5, 6, 7)),
        replace(BARE, messages=MESSAGES[:2]),
    ]
    chat, text, given, shorter = tokenizer.tokenize(requests)
    np.testing.assert_array_equal(chat.token_ids, encoder.encode_chat(Chat(tuple(MESSAGES))).token_ids)
    np.testing.assert_array_equal(shorter.token_ids, encoder.encode_chat(Chat(tuple(MESSAGES[:2]))).token_ids)
    np.testing.assert_array_equal(text.token_ids, encoder.encode_text("Once upon").token_ids)
    assert given.token_ids.tolist() == [5, 6, 7]
    assert encoder.backend.decode(chat.answer_ids.tolist()) == "152 years."
    assert len(text.answer_ids) == 0
    assert [request.index for request in (chat, text, given, shorter)] == [0, 1, 2, 3]


def test_batches_do_not_show(tokenizer: RequestTokenizer) -> None:
    """More requests than fit one."""
    requests = [replace(BARE, prompt=f"prompt {number}") for number in range(150)]
    found = list(tokenizer.tokenize(requests))
    assert [request.logged.prompt for request in found] == [request.prompt for request in requests]
    (alone,) = tokenizer.tokenize([requests[99]])
    np.testing.assert_array_equal(found[99].token_ids, alone.token_ids)


def test_what_the_template_refuses_is_written_plainly(
    tokenizer: RequestTokenizer, encoder: PromptEncoder
) -> None:
    """A role that it does not know."""
    messages = (*MESSAGES, {"role": "critic", "content": "152"})
    (request,) = tokenizer.tokenize([replace(BARE, messages=messages)])
    assert encoder.backend.decode(request.token_ids.tolist()) == plain_layout(messages)


def test_a_bare_tokenizer_file(encoder: PromptEncoder) -> None:
    """Needs no template."""
    bare = RequestTokenizer.load(MODEL_PATH / "tokenizer.json")
    (request,) = bare.tokenize([replace(BARE, messages=MESSAGES)])
    assert encoder.backend.decode(request.token_ids.tolist()) == plain_layout(MESSAGES)
    assert bare.digest == RequestTokenizer.load(MODEL_PATH / "tokenizer.json").digest


def test_what_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        RequestTokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError):
        RequestTokenizer.load(tmp_path)


def test_equal_hashes_are_equal_tokens(tokenizer: RequestTokenizer) -> None:
    """Block by block; the last is cut; other hashes share next to nothing."""
    one, two, other = tokenizer.tokenize(
        [_blocks((7, 8, 9), 1100), _blocks((7, 8, 10), 1536), _blocks((70, 80), 1024)]
    )
    assert (one.num_tokens, two.num_tokens) == (1100, 1536)
    np.testing.assert_array_equal(one.token_ids[:1024], two.token_ids[:1024])
    assert (one.token_ids[1024:] == two.token_ids[1024:1100]).mean() < 0.1
    assert (one.token_ids[:1024] == other.token_ids).mean() < 0.1
    (again,) = RequestTokenizer.load("demo").tokenize([_blocks((7, 8, 9), 1100)])
    np.testing.assert_array_equal(one.token_ids, again.token_ids)


def test_times_never_decrease(tokenizer: RequestTokenizer) -> None:
    """0 until the log tells one, then the latest so far."""
    times = (None, 5.0, None, 3.0, 8.0)
    requests = [replace(BARE, prompt="x", time_s=time_s) for time_s in times]
    assert [request.time_s for request in tokenizer.tokenize(requests)] == [0.0, 5.0, 5.0, 5.0, 8.0]


def test_a_length_alone_is_refused(tokenizer: RequestTokenizer) -> None:
    with pytest.raises(LogError, match="line 1: a request without text"):
        list(tokenizer.tokenize([replace(BARE, num_tokens=100)]))


def test_embedders_see_what_was_asked_last() -> None:
    """Then what came just before; never the system prompt; of a long text its head and tail."""
    assert embedder_text(replace(BARE, messages=MESSAGES)) == (
        "And how old?\n42 metres.\nHow tall is the tower?"
    )
    long = "a" * 5000 + "b" * 5000
    text = embedder_text(replace(BARE, messages=({"role": "user", "content": long},)))
    assert len(text) <= WINDOW_CHARS
    assert (text[0], text[-1]) == ("a", "b")
    assert embedder_text(replace(BARE, prompt=long)) == text
    assert embedder_text(_blocks((1,), 512)) == ""
