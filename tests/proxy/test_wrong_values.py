"""Each message about a wrong value names the field, what was expected and what was found; never a text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvshare.errors import RequestError
from proxy.request_body import KVShareField, KVShareObject, at_most, validated
from proxy.wrong_values import wrong

PROMPT = "a prompt that no message repeats"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImagePart(Strict):
    type: Literal["image"]
    image: str


class NamedChoice(Strict):
    type: Literal["one"]
    name: str


class SomeChoice(Strict):
    type: Literal["some"]
    mode: Literal["auto", "required"]


def refuse(value: object) -> object:
    raise wrong("something else", value)


class Body(Strict):
    model: str = "m"
    id: Annotated[str, Field(min_length=1, max_length=8)] = "x"
    content: str | list[TextPart | ImagePart] | None = None
    parts: list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] = []
    choice: Literal["none", "auto"] | NamedChoice | SomeChoice = "auto"
    role: Literal["user", "system"] = "user"
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    stream: bool = False
    few: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    counted: Annotated[list[int], at_most(2)] = []
    biases: dict[Annotated[str, Field(pattern="^[0-9]+$")], float] = {}
    digits: Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(lambda text: [*map(int, text)])] = [
        1
    ]
    own: Annotated[Any, BeforeValidator(refuse)] = None
    kvshare: KVShareField = None


@pytest.mark.parametrize(
    ("document", "param", "message"),
    [
        ({"model": 5}, "model", "Invalid 'model': expected a valid string, got 5."),
        ({"model": None}, "model", "Invalid 'model': expected a valid string, got null."),
        ({"model": []}, "model", "Invalid 'model': expected a valid string, got an empty list."),
        ({"model": {"a": 1}}, "model", "Invalid 'model': expected a valid string, got an object."),
        ({"n": 0}, "n", "Invalid 'n': expected greater than or equal to 1, got 0."),
        ({"n": 9}, "n", "Invalid 'n': expected less than or equal to 8, got 9."),
        ({"n": 1.5}, "n", "Invalid 'n': expected a valid integer, got 1.5."),
        ({"n": True}, "n", "Invalid 'n': expected a valid integer, got true."),
        ({"n": 10**60}, "n", "Invalid 'n': expected less than or equal to 8, got a longer number."),
        ({"share": 0}, "share", "Invalid 'share': expected greater than 0, got 0."),
        ({"share": 1.0}, "share", "Invalid 'share': expected less than 1, got 1.0."),
        ({"share": PROMPT}, "share", "Invalid 'share': expected a valid number, got a string."),
        ({"stream": "yes"}, "stream", "Invalid 'stream': expected a valid boolean, got a string."),
        ({"id": ""}, "id", "Invalid 'id': String should have at least 1 character, got an empty string."),
        ({"id": PROMPT}, "id", "Invalid 'id': String should have at most 8 characters, got a string."),
        ({"digits": "102"}, "digits[1]", "Invalid 'digits[1]': expected greater than or equal to 1, got 0."),
        ({"role": "tool"}, "role", "Invalid 'role': expected 'user' or 'system', got 'tool'."),
        ({"role": 1}, "role", "Invalid 'role': expected 'user' or 'system', got 1."),
        ({"few": []}, "few", "Invalid 'few': List should have at least 1 item after validation, not 0."),
        (
            {"few": [1, 2, 3]},
            "few",
            "Invalid 'few': List should have at most 2 items after validation, not 3.",
        ),
        ({"few": [1, "b"]}, "few[1]", "Invalid 'few[1]': expected a valid integer, got a string."),
        ({"counted": [0] * 3}, "counted", "Invalid 'counted': expected at most 2 entries, got a list of 3."),
        ({"biases": {"1": "x"}}, "biases.1", "Invalid 'biases.1': expected a valid number, got a string."),
        ({"own": PROMPT}, "own", "Invalid 'own': expected something else, got a string."),
    ],
)  # fmt: skip
def test_a_wrong_value(document: dict[str, object], param: str, message: str) -> None:
    """The field, what was expected, what was found."""
    assert refusal(document) == (message, param, None)


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        (5, "content", "Invalid 'content': expected a valid string or a valid list, got 5."),
        ([5], "content[0]", "Invalid 'content[0]': expected a valid dictionary, got 5."),
        ([{"type": "text"}], "content[0].text", "Invalid 'content[0].text': Field required."),
        (
            [{"type": "text", "text": 5}],
            "content[0].text",
            "Invalid 'content[0].text': expected a valid string, got 5.",
        ),
        (
            [{"type": "audio"}],
            "content[0].type",
            "Invalid 'content[0].type': expected 'text' or 'image', got 'audio'.",
        ),
    ],
)
def test_a_union_speaks_of_the_branch_that_was_meant(content: object, param: str, message: str) -> None:
    """Branches that the client did not mean are not mentioned, and their names are not in the path."""
    assert refusal({"content": content}) == (message, param, None)


@pytest.mark.parametrize(
    ("choice", "param", "message"),
    [
        ("all", "choice", "Invalid 'choice': expected 'none' or 'auto' or a valid dictionary, got 'all'."),
        (3, "choice", "Invalid 'choice': expected 'none' or 'auto' or a valid dictionary, got 3."),
        (
            {"type": "some", "mode": "none"},
            "choice.mode",
            "Invalid 'choice.mode': expected 'auto' or 'required', got 'none'.",
        ),
        ({"type": "all"}, "choice.type", "Invalid 'choice.type': expected 'one' or 'some', got 'all'."),
        ({"type": "one"}, "choice.name", "Invalid 'choice.name': Field required."),
    ],
)
def test_a_union_of_words_and_objects(choice: object, param: str, message: str) -> None:
    """Both are named where neither was meant; a wrong word inside of an object is that object's."""
    assert refusal({"choice": choice}) == (message, param, None)


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        ({}, "parts[0].type", "Invalid 'parts[0].type': Field required."),
        (
            {"type": "audio"},
            "parts[0].type",
            "Invalid 'parts[0].type': expected one of 'text', 'image', got 'audio'.",
        ),
        ({"type": "image"}, "parts[0].image", "Invalid 'parts[0].image': Field required."),
        (
            {"type": "text", "text": None},
            "parts[0].text",
            "Invalid 'parts[0].text': expected a valid string, got null.",
        ),
    ],
)
def test_a_tagged_union(part: dict[str, object], param: str, message: str) -> None:
    """The tag's own field is named when it is wrong, and nothing but the tag's branch otherwise."""
    assert refusal({"parts": [part]}) == (message, param, None)


def test_an_unknown_key_is_answered_with_those_that_exist() -> None:
    """The way out of a misspelt key, in the one object whose keys are ours."""
    known = ", ".join(KVShareObject.model_fields)
    message = f"Unknown key 'kvshare.mod': expected one of {known}."
    assert refusal({"kvshare": {"mod": PROMPT}}) == (message, "kvshare.mod", "unknown_parameter")


def test_words_are_quoted_in_part() -> None:
    """Somebody's text in a field of few words is cut; a param is, too."""
    assert refusal({"parts": [{"type": "x" * 500}]})[0].endswith(f"got '{'x' * 40}…'.")
    assert refusal({"role": "x" * 500})[0].endswith(f"got '{'x' * 40}…'.")
    assert len(refusal({"kvshare": {"y" * 500: 1}})[1] or "") == 200


def test_many_wrong_entries_are_one_message() -> None:
    """The first of them."""
    assert refusal({"few": ["a"] * 100_000})[0].startswith("Invalid 'few")


def refusal(document: dict[str, object]) -> tuple[str, str | None, str | None]:
    """What is said of a document that is refused."""
    with pytest.raises(RequestError) as caught:
        validated(Body, document)
    assert PROMPT not in str(caught.value)
    return str(caught.value), caught.value.param, caught.value.code
