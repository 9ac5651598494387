"""Token ids in vLLM's JSON: what is read as an array, what is refused, and that nothing else is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare.fleet.token_lists import read_entries

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
COMPACT = (",", ":")


@settings(deadline=None)
@given(IDS, st.text(), st.sampled_from([COMPACT, None, (" ,\n", " : ")]), st.booleans())
def test_what_is_read_is_what_a_decoder_reads(
    ids: list[int], text: str, separators: tuple[str, str] | None, is_listed: bool
) -> None:
    """Ids and all other members, however they are spaced, whatever a text says that stands before the ids."""
    document = {"request_id": text, "token_ids": ids, "features": {"token_ids": [1]}, "text": text}
    raw = json.dumps([document] if is_listed else document, separators=separators).encode()
    ((entry, tokens),) = read_entries(raw, "token_ids")
    assert tokens.token_ids.tolist() == ids
    assert json.loads(tokens.raw) == ids
    assert {**entry, "token_ids": ids} == document


@pytest.mark.parametrize(
    "document",
    [
        {"features": {"token_ids": [9]}, "token_ids": [1, 2]},
        {"a": [{"token_ids": [9]}], "token_ids": [1, 2]},
        {"text": '{"token_ids":[9]}', "token_ids": [1, 2]},
        {"text": '\\"token_ids":[9', "token_ids": [1, 2]},
    ],
)
def test_lists_of_the_same_name_elsewhere_are_not_the_prompt(document: dict[str, object]) -> None:
    """A client may have written them: into a schema, or a text."""
    for separators in (COMPACT, None):
        ((entry, tokens),) = read_entries(json.dumps(document, separators=separators).encode(), "token_ids")
        assert tokens.token_ids.tolist() == json.loads(tokens.raw) == [1, 2]
        assert {**entry, "token_ids": [1, 2]} == document


def test_each_of_several_has_its_own() -> None:
    """vLLM renders each prompt of a completion with several."""
    raw = json.dumps([{"token_ids": [number]} for number in range(3)]).encode()
    assert [tokens.token_ids.tolist() for _, tokens in read_entries(raw, "token_ids")] == [[0], [1], [2]]


@pytest.mark.parametrize(
    "ids",
    [
        "1",
        "null",
        '"[1]"',
        "[1,[2],3]",
        "[[1],[2]]",
        "[1,,2]",
        "[1,2,]",
        "[,1]",
        "[1 2]",
        "[1.5]",
        "[1e3]",
        "[-1]",
        "[2147483648]",
        "[4294967297]",
        "[18446744073709551617]",
        '["1"]',
        "[true]",
        "[null]",
        "[1,2",
        "[1]]",
        "[NaN]",
    ],
)
@pytest.mark.parametrize(
    "frame", ['{"token_ids":%s}', '[{"token_ids":%s}]', '[{"token_ids":[1]},{"token_ids":%s}]']
)
def test_what_are_no_token_ids_is_refused(frame: str, ids: str) -> None:
    """A number that does not fit would become another one, and with it another prompt."""
    with pytest.raises(ValueError, match=r"."):
        read_entries((frame % ids).encode(), "token_ids")


@pytest.mark.parametrize("raw", [b"", b"3", b"[3]", b"null", b'{"tokens":[1]}', b'{"token_ids":[1]', b"\xff"])
def test_another_answer_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_entries(raw, "token_ids")
