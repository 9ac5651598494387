"""A body is strict JSON within limits; what is wrong about it is said in plain words, without its text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare.errors import RequestError
from proxy.json_text import MAX_VALUES, parse_object


def refusal(raw: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse_object(raw)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "it is empty"),
        (b" \n", "it is blank"),
        (b"{", "expected a name in double quotes, found the end of the body at character 1"),
        (b"{'a': 1}", "expected a name in double quotes, found a single quote at character 1"),
        (b"{a: 1}", "expected a name in double quotes, found a letter at character 1"),
        (b"{1: 1}", "expected a name in double quotes, found a digit at character 1"),
        (b'{"a": 1,}', "expected a name in double quotes, found '}' at character 8"),
        ("{“a”: 1}".encode(), "expected a name in double quotes, found a typographic quote at character 1"),
        (b'{"a"}', "expected a colon after the name, found '}' at character 4"),
        (b'{"a": }', "expected a value, found '}' at character 6"),
        (b'{"a": undefined}', "expected a value, found a letter at character 6"),
        (b'{"a": [1 2]}', "expected a comma, or the end of the list or object, found a digit at character 9"),
        (
            b'{"a": 1',
            "expected a comma, or the end of the list or object, found the end of the body at character 7",
        ),
        (b'{"a": 1;', "expected a comma, or the end of the list or object, found ';' at character 7"),
        (b"{}{}", "expected nothing after the object, found '{' at character 2"),
        (
            b'{"a": "b\n"}',
            r"expected control characters in strings as escapes such as \n, found the control ",
        ),
        (b'{"a": "b\n"}', "control character U+000A at character 8"),
        (b'{"a": "b\0"}', "control character U+0000 at character 8"),
        (rb'{"a": "\x"}', r"expected one of \" \\ \/ \b \f \n \r \t \u, found a letter at character 7"),
        (rb'{"a": "\u12"}', r"expected four hexadecimal digits after \u"),
        (
            b'{"a": "b',
            "expected the double quote that ends the string, which begins there, found the end of the body",
        ),
        ('\ufeff{"a": 1}'.encode(), "expected UTF-8 without a byte order mark, found one at its start"),
        ("\xa0{}".encode(), "expected a value, found U+00A0 at character 0"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
    ],
)
def test_what_is_no_json_is_said_in_plain_words(raw: bytes, words: str) -> None:
    """What was expected and what was found, not what Python's decoder calls it."""
    message = refusal(raw)
    assert message.startswith("The body is not JSON: ")
    assert words in message
    assert "utf-8-sig" not in message
    assert "at at" not in message


@pytest.mark.parametrize(
    ("number", "is_taken"),
    [
        ("1e308", True),
        ("1e999", False),
        ("-1E+400", False),
        ("1e-999", True),
        ("9" * 300, True),
        ("9" * 400, False),
        ("9" * 400 + ".5", False),
        ("0." + "9" * 400, True),
        ("9" * 5000, False),
    ],
)
def test_numbers_that_no_double_holds_are_refused(number: str, is_taken: bool) -> None:
    """Python would read them as infinity; texts that look like them are texts."""
    document = f'{{"text": "{number}", "number": {number}}}'.encode()
    if is_taken:
        assert parse_object(document)["number"] == json.loads(number)
    else:
        assert "cannot be represented" in refusal(document)
    assert parse_object(f'{{"text": "{number}"}}'.encode())["text"] == number


@pytest.mark.parametrize("escaped", [r"\ud800", r"\udfff", r"\uD83Dx", r"\ud83d\ud83d"])
@pytest.mark.parametrize("document", ['{"a": "%s"}', '{"%s": 1}', '{"a": [{"b": "%s"}]}'])
def test_half_a_character_is_refused(document: str, escaped: str) -> None:
    """In values and in names; an escaped backslash before the same letters is text."""
    assert "lone surrogate" in refusal((document % escaped).encode())
    assert parse_object((document % escaped.replace("\\", "\\\\")).encode())
    assert parse_object((document % r"\ud83d\ude00").encode())


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"[]", "a list"),
        (b'"x"', "a string"),
        (b"null", "null"),
        (b"true", "true or false"),
        (b"3", "a number"),
    ],
)
def test_another_value_than_an_object_is_named(raw: bytes, kind: str) -> None:
    """The message says what came instead."""
    assert refusal(raw) == f"The JSON body must be an object, got {kind}."


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [' + b"[]," * (MAX_VALUES // 2) + b"[]]}",
        b'{"a": [' + b"1," * MAX_VALUES + b"1]}",
        b'{"a": [' + b'"\\"",' * MAX_VALUES + b"1]}",
        b"{" + b'"":1,' * (MAX_VALUES // 3) + b'"":1}',
        b"[" * (MAX_VALUES + 1),
    ],
    ids=["lists", "numbers", "texts", "names", "deep"],
)
def test_too_many_values_are_refused_before_they_are_read(raw: bytes) -> None:
    """The decoder lets nothing else run, so what it is given is bounded."""
    assert f"too many values: expected at most {MAX_VALUES}" in refusal(raw)


@pytest.mark.parametrize("text", ['[{,:"', "\\", '\\"', '\\\\",['])
def test_marks_within_texts_are_not_counted(text: str) -> None:
    """A long text may have any number of commas and brackets, quotes and backslashes."""
    content = text * (MAX_VALUES // len(text) + 1)
    assert parse_object(json.dumps({"a": content, "b": [1, 2]}).encode())["a"] == content


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:\\u0 1e+-.\n', max_size=30).map(str.encode))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    """Nothing else than RequestError, whatever comes; and Python's words never."""
    try:
        message = str(parse_object(raw))
    except RequestError as exc:
        message = str(exc)
    assert "expected something else" not in message
