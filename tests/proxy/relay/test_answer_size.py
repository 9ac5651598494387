"""How many tokens an answer has that passes unread."""

from __future__ import annotations

import pytest

from proxy.relay.answer_size import AnswerSize

CHAT = b'{"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 21, "completion_tokens": 12}}'
MESSAGE = b'{"content": [], "usage": {"input_tokens":9,"output_tokens":7}, "stop": null}'
QUOTED = b'{"text": "\\"completion_tokens\\": 99", "usage": {"completion_tokens": 3}}'


@pytest.mark.parametrize(
    ("body", "is_stream", "expected"),
    [
        (CHAT, False, 12),
        (MESSAGE, False, 7),
        (QUOTED, False, 3),
        (b"x" * 100_000 + CHAT, False, 12),
        (b'{"data": [1, 2]}', False, 0),
        (b"", False, 0),
        (b"data: {}\n\n" * 5, True, 5),
        (b"event: a\ndata: {}\n\n" * 3 + b"data: [DONE]\n\n", True, 4),
    ],
)
@pytest.mark.parametrize("size", [7, 64, 10**6])
def test_the_tokens_of_an_answer(body: bytes, is_stream: bool, expected: int, size: int) -> None:
    """The usage of a JSON body and the events of a stream, in whatever pieces they come; about."""
    answer = AnswerSize()
    for start in range(0, len(body), size):
        answer.feed(body[start : start + size], is_stream=is_stream)
    lost = 2 if is_stream else 0  # an event may end between two pieces
    assert expected - lost <= answer.num_tokens <= expected
