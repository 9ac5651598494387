"""Text leaves the engine whole: stop strings are caught across tokens, characters are never torn."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvshare.demo import MODEL_PATH
from kvshare.engines.embedded.choice import Detokenizer, StopMatcher, token_text


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
