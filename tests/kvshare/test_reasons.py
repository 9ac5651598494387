"""Every reason is explained, and given somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvshare.reasons import Reason, cache_miss_reason, explanations

_ROOT = Path(__file__).parents[2]


def test_every_reason_is_explained() -> None:
    assert all(explanations().values())


def test_every_reason_is_given_somewhere() -> None:
    """mypy finds a word that is no reason; this finds a reason that nothing gives any more."""
    files = (file for folder in ("kvshare", "proxy") for file in (_ROOT / folder).rglob("*.py"))
    texts = [file.read_text("utf-8") for file in files]
    code = "\n".join(
        text for text in texts if re.search(r"^from kvshare\.reasons import .*\bReason\b", text, re.M)
    )
    given = set(re.findall(r"\bReason\.([A-Z_]+)\b", code))
    assert given == {reason.name for reason in Reason} - {"UNKNOWN"}


@pytest.mark.parametrize("reason", Reason)
def test_an_explanation_is_a_sentence_or_a_few(reason: Reason) -> None:
    sentence = explanations()[reason]
    assert sentence[0].isupper() or sentence.startswith("vLLM")
    assert sentence.endswith(".")
    assert "  " not in sentence
    assert cache_miss_reason(reason) == {"type": reason, "message": sentence}


def test_nothing_refused_has_no_reason_and_an_unknown_one_is_passed_on() -> None:
    """A connector of another version may have words of its own."""
    assert cache_miss_reason(None) is None
    unknown = cache_miss_reason("solar_wind")
    assert unknown == {"type": "solar_wind", "message": explanations()[Reason.UNKNOWN]}
    assert Reason.of("solar_wind") is Reason.UNKNOWN
