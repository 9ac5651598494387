"""Text leaves the engine whole: stop strings are caught across tokens, characters are never torn."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import BPE

from kvshare.demo import MODEL_PATH
from kvshare.embedded.choice import Detokenizer, StopMatcher, token_text
from kvshare.embedded.held_logprobs import HeldLogprobs
from kvshare.engine import TokenLogprob


@given(text=st.text(alphabet="abc", max_size=40), cuts=st.lists(st.integers(0, 40)), data=st.data())
def test_a_stop_string_is_found_wherever_the_text_is_cut(
    text: str, cuts: list[int], data: st.DataObject
) -> None:
    """Fed in pieces, the matcher shows exactly what stands before the first stop string."""
    stops = tuple(data.draw(st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1)))
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    matcher, shown, stopped = StopMatcher(stops), "", False
    for start, end in pairwise(edges):
        piece, stopped = matcher.add(text[start:end])
        shown += piece
        if stopped:
            break
    shown += matcher.flush()
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert stopped == bool(places)
    if not stopped:
        assert shown == text
        assert matcher.met is None
    else:
        assert matcher.met in stops
        assert text.startswith(shown + matcher.met)
        # Pieces are looked at as they come: nothing of the stop that ended it is shown.
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)


def test_without_stop_strings_nothing_is_held_back() -> None:
    """The usual case costs nothing."""
    matcher = StopMatcher(())
    assert matcher.add("abc") == ("abc", False)
    assert matcher.flush() == ""


@pytest.mark.parametrize("text", ["plain words", "größe 42 µg", "日本語のテキスト", "🙂🙃 ok", "a\n\tb"])
def test_pieces_add_up_to_the_text(text: str) -> None:
    """A character of several bytes comes out once, whole."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_the_bytes_of_tokens_add_up_to_the_text() -> None:
    """Also where a token holds a part of a character, whose text alone is a replacement mark."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    text = "größe 🙂 漢字"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [token_text(tokenizer, token_id) for token_id in ids]
    assert b"".join(raw for _, raw in pieces).decode() == text
    assert any("\N{REPLACEMENT CHARACTER}" in shown for shown, _ in pieces)


def test_a_token_of_sentencepiece_has_its_space() -> None:
    """Decoded alone it would lose it, and two tokens would have one text."""
    vocabulary = {"<unk>": 0, "\u2581a": 1, "a": 2, "\u2581": 3}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = Metaspace()
    assert [token_text(tokenizer, token_id)[0] for token_id in (1, 2, 3)] == [" a", "a", " "]
    assert token_text(tokenizer, 1)[1] == b" a"


def logprob(number: int) -> TokenLogprob:
    return TokenLogprob(number, f"<{number}>", b"", -1.0)


def taken(held: HeldLogprobs, num_shown: int, *, ended: bool = False) -> list[tuple[int, int]]:
    return [(each.token_id, each.offset) for each in held.take(num_shown=num_shown, ended=ended)]


def test_tokens_leave_with_the_character_that_they_make() -> None:
    """All at its place; the next token is one character further."""
    held = HeldLogprobs()
    held.add(logprob(0), num_decoded=2)
    held.add(logprob(1), num_decoded=2)
    assert taken(held, 2) == [(0, 0)]
    held.add(logprob(2), num_decoded=3)
    held.add(logprob(3), num_decoded=4)
    assert taken(held, 3) == [(1, 2), (2, 2)]
    assert taken(held, 4) == [(3, 3)]
    held.add(logprob(4), num_decoded=4)
    assert taken(held, 4) == []
    assert taken(held, 4, ended=True) == [(4, 4)]  # the end of the sequence, or a character that was cut


def test_tokens_of_a_stop_string_do_not_leave() -> None:
    """Unless a part of their text does."""
    for num_shown, shown in ((0, []), (1, [0]), (2, [0]), (3, [0, 1]), (4, [0, 1])):
        held = HeldLogprobs()
        for number, num_decoded in enumerate((2, 4, 6, 6)):
            held.add(logprob(number), num_decoded=num_decoded)
        assert [number for number, _ in taken(held, num_shown, ended=True)] == shown
