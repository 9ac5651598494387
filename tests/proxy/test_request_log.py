"""What the log says of exceptions: never their messages, which may quote a prompt."""

from __future__ import annotations

import pytest

from proxy.request_log import class_and_place


def fail() -> None:
    """Raise an error with a cause; both quote a prompt."""
    try:
        raise OSError("SECRET")
    except OSError as exc:
        raise ValueError("SECRET") from exc


def test_an_exception_is_logged_by_class_and_place() -> None:
    """So is each of its causes; what they say stays out."""
    with pytest.raises(ValueError, match="SECRET") as caught:
        fail()
    text = class_and_place(caught.value)
    assert text.startswith("ValueError at test_request_log.py:")
    assert ", caused by OSError at test_request_log.py:" in text
    assert "SECRET" not in text


def test_an_exception_that_was_not_raised_has_no_place() -> None:
    """Its class is all there is to say."""
    assert class_and_place(ValueError("SECRET")) == "ValueError"
