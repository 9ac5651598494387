"""The table of benchmarks that the README quotes."""

import json

import pytest

from measure import FOLDER, ROWS, in_words


@pytest.mark.parametrize("name", ROWS)
def test_every_measured_document_is_said_in_words(name: str) -> None:
    """Each row's words find their figures in the document that lies in docs/measured."""
    words = in_words(name, json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    assert any(character.isdigit() for character in words)
    assert "\n" not in words
