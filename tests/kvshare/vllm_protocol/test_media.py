"""What stands for media in a prompt's tokens."""

import hashlib
from itertools import combinations

import numpy as np
import pytest

from delta_tree import Span, token_ids
from kvshare.vllm_protocol.media import FIRST_ID, MIN_TOKENS, Medium, identified

TOKENS = token_ids([5] * 10 + [290] * 20 + [6] * 10)


def digest(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()


def with_medium(word: str, start: int = 10, end: int = 30) -> list[int]:
    ids: list[int] = identified(TOKENS, [Medium(Span(start, end), digest(word))]).tolist()
    return ids


def test_only_placeholders_are_replaced_and_all_of_them_differ() -> None:
    """By ids of no vocabulary; the text stays."""
    ids = with_medium("one")
    assert (ids[:10], ids[30:]) == ([5] * 10, [6] * 10)
    assert len(set(ids[10:30])) == 20
    assert all(FIRST_ID <= token < 2**31 for token in ids[10:30])
    assert token_ids(ids).tolist() == ids  # the delta tree takes them


def test_the_same_medium_has_the_same_ids_anywhere() -> None:
    assert with_medium("one")[10:30] == with_medium("one", 15, 35)[15:35]


@pytest.mark.parametrize("length", [9, 10, 19, 21, 30])
def test_a_medium_of_another_number_of_tokens_is_another(length: int) -> None:
    """Models that cut a lone image into more tiles compute other embeddings for it, under the same digest."""
    ids = with_medium("one", 10, 10 + length)[10 : 10 + length]
    assert not any(a == b for a, b in zip(ids, with_medium("one")[10:30], strict=False))


def test_other_media_have_other_ids() -> None:
    """In every place."""
    for one, other in combinations("abcdefgh", 2):
        first, second = with_medium(one), with_medium(other)
        assert not any(a == b for a, b in zip(first[10:30], second[10:30], strict=True))


def test_a_prompt_of_text_stays_as_it_is() -> None:
    assert identified(TOKENS, ()) is TOKENS


@pytest.mark.parametrize(
    ("length", "name", "is_identified"),
    [
        (MIN_TOKENS, digest("x"), True),
        (MIN_TOKENS - 1, digest("x"), False),  # they would stand for a part of the digest
        (576, hashlib.sha512(b"x").hexdigest(), True),
        (576, "cat.png", False),
        (576, "renderer0-mm-1-image-0", False),  # vLLM's own where it makes no digests
        (576, digest("x")[:-1], False),
        (576, digest("x").upper(), False),
    ],
)
def test_what_is_no_full_digest_is_not_identified(length: int, name: str, is_identified: bool) -> None:
    assert Medium(Span(3, 3 + length), name).is_identified == is_identified


def test_the_ids_hold_the_digest() -> None:
    """At least 256 bits of the stream that it begins, even in the smallest medium."""
    assert MIN_TOKENS * int(np.log2(FIRST_ID)) >= 256


@pytest.mark.parametrize("span", [Span(30, 41), Span(10, 10)])
def test_a_medium_outside_the_prompt_is_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="medium"):
        identified(TOKENS, [Medium(span, digest("x"))])
