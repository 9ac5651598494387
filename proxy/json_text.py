"""
JSON as clients send it: UTF-8, nothing that strict JSON forbids, and no more of it than can be read at once.

Python's decoder lets nothing else run until it is through, so what it may be given is bounded by number of
values, not by bytes alone. No error quotes the body: it names the place, and a single mark that stands there.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from kvshare.errors import RequestError

MAX_VALUES = 2_000_000  # of a body, in lists, objects and alone; a member's name counts twice
_MAX_DIGITS = 309  # of a number: what a double holds has no more before the point

# What Python's decoder calls a problem, and what it expected where that is.
_EXPECTED: Mapping[str, str] = {
    "Expecting value": "a value",
    "Expecting property name enclosed in double quotes": "a name in double quotes",
    "Expecting ':' delimiter": "a colon after the name",
    "Expecting ',' delimiter": "a comma, or the end of the list or object",
    "Extra data": "nothing after the object",
    "Invalid control character at": r"control characters in strings as escapes such as \n",
    "Invalid \\escape": r"one of \" \\ \/ \b \f \n \r \t \u",
    "Invalid \\uXXXX escape": r"four hexadecimal digits after \u",
    "Unterminated string starting at": "the double quote that ends the string, which begins there",
}
_MARKS = {
    "'": "a single quote",
    '"': "a double quote",
    ",": "a comma",
    ":": "a colon",
    "\\": "a backslash",
    "\ufeff": "a byte order mark",
    **dict.fromkeys("“”„‘’", "a typographic quote"),
}
# Digits become 0, what else may stand in a large number stays. Plain searches are fast, expressions are not.
_DIGITS = bytes(
    ord("0") if byte in b"0123456789" else byte if byte in b"e+" else ord(" ") for byte in range(256)
)
_LONG_NUMBERS = (b"e000", b"e+000", b"0" * _MAX_DIGITS)  # among these, or texts that look so
_VALUES = (b",", b"[", b"{", b":", b":")
_PIECE = 1 << 20  # bytes that are counted at a time


def parse_object(raw: bytes) -> dict[str, Any]:
    """
    The object that a body holds; a name that comes twice has its last value.

    Raises:  RequestError for what strict JSON forbids (NaN, Infinity, lone surrogates, a byte order mark),
    numbers that no double holds, nesting that exhausts the decoder, and more than MAX_VALUES
    """
    _check_num_values(raw)
    try:
        document = _decode(raw)
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.") from None
    except UnicodeDecodeError as exc:
        raise RequestError(f"The body is not UTF-8: byte {exc.start} cannot be decoded.") from None
    except json.JSONDecodeError as exc:
        raise RequestError(f"The body is not JSON: {_problem(exc)}.") from None
    if not isinstance(document, dict):
        kind = {list: "a list", str: "a string", type(None): "null", bool: "true or false"}
        raise RequestError(f"The JSON body must be an object, got {kind.get(type(document), 'a number')}.")
    return document


def _decode(raw: bytes) -> object:
    text = raw.decode("utf-8")
    digits = raw.lower().translate(_DIGITS)
    is_long = any(number in digits for number in _LONG_NUMBERS)
    # The decoder takes several times as long with these hooks.
    hooks: dict[str, Any] = {"parse_int": _int, "parse_float": _float} if is_long else {}
    document = json.loads(text, parse_constant=_refuse_constant, **hooks)
    if b"\\ud" in raw or b"\\uD" in raw:
        _check_unicode(document)
    return document


def _check_num_values(raw: bytes) -> None:
    """Raises RequestError for more values than MAX_VALUES."""
    if len(raw) <= MAX_VALUES or sum(raw.count(mark) for mark in _VALUES) <= MAX_VALUES:
        return
    unescaped, is_inside, num_values = raw.replace(rb"\\", b"").replace(rb"\"", b""), 0, 0
    for start in range(0, len(unescaped), _PIECE):
        piece = np.frombuffer(unescaped[start : start + _PIECE], dtype=np.uint8)
        quotes = np.cumsum(piece == ord('"'), dtype=np.uint8) + np.uint8(is_inside)
        outside = piece[quotes & 1 == 0].tobytes()
        is_inside = int(quotes[-1]) & 1
        num_values += sum(outside.count(mark) for mark in _VALUES)
    if num_values > MAX_VALUES:
        raise RequestError(
            f"The JSON body has too many values: expected at most {MAX_VALUES}, where a name counts twice."
        )


def _check_unicode(document: object) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer takes. UTF-8 itself cannot hold one."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("The JSON body holds a lone surrogate, which is not valid Unicode text.") from None


def _problem(exc: json.JSONDecodeError) -> str:
    if not exc.doc.strip():
        return "it is empty" if not exc.doc else "it is blank"
    if exc.doc.startswith("\ufeff"):
        return "expected UTF-8 without a byte order mark, found one at its start"
    expected = _EXPECTED.get(exc.msg, "something else")
    if exc.msg.startswith("Unterminated"):
        return f"expected {expected}, found the end of the body: at character {exc.pos}"
    at = exc.pos + 1 if exc.msg == "Invalid \\escape" else exc.pos
    return f"expected {expected}, found {_found(exc.doc[at : at + 1])} at character {exc.pos}"


def _found(letter: str) -> str:
    """Name the kind of a single character, without revealing the text."""
    if not letter:
        return "the end of the body"
    if letter in _MARKS:
        return _MARKS[letter]
    if letter.isalnum():
        return "a digit" if letter.isdigit() else "a letter"
    if letter.isascii() and letter.isprintable():
        return f"'{letter}'" if letter != " " else "a space"
    category = unicodedata.category(letter)
    return f"the control character U+{ord(letter):04X}" if category == "Cc" else f"U+{ord(letter):04X}"


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise RequestError(
            f"The JSON body holds a number of {len(digits)} digits, which cannot be represented."
        )
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise RequestError("The JSON body holds a number that cannot be represented: it is above 1.8e308.")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"The body is not JSON: {name} is not a number.")
